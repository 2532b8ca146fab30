"""The verl trainer: a TrainEngine whose weights lie in Ray workers."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.checkpoint import copy_model_files
from fakevllm_server.backends.process.single_thread import OneThread
from fakevllm_server.backends.training.epochs import mean_of_epochs
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR, is_too_far
from fakevllm_server.backends.training.partial_step import UpdateTracker, partial_step_guard
from fakevllm_server.backends.verl.cluster import Cluster
from fakevllm_server.backends.verl.group import Workers, WorkersLost
from fakevllm_server.backends.verl.policy import Policy
from fakevllm_server.backends.verl.rows import as_tensordict, of_responses
from fakevllm_server.backends.verl.seen import seen
from fakevllm_server.backends.verl.shares import deal
from fakevllm_server.types.backend import (
    BackendError,
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
)

Result = TypeVar("Result")

LOST_EXIT_CODE = 70
"""Not 2, which would say that the user must mend something."""
CLOSE_WITHIN_S = 5.0
NO_REFERENCE = (
    "the verl trainer was started without the reference that this job needs (kl_loss_coef or "
    "use_kl_in_reward): stop the engine, and start it with this job"
)


class VerlTrainer:
    def __init__(
        self,
        cluster: Cluster,
        workers: Workers,
        model: Path,
        export_dtype: torch.dtype,
        micro_batch_tokens: int | None,
        *,
        has_reference: bool = False,
    ) -> None:
        """`micro_batch_tokens` wins over the job's. `has_reference`: the workers keep one."""
        self._cluster = cluster
        self._workers = workers
        self._model = model
        self._export_dtype = export_dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._has_reference = has_reference
        self._job = TrainJob()
        self._policy: Policy | None = None
        self._thread = OneThread("trainer", lambda: None)

    async def boot(self, job: TrainJob) -> None:
        await self._run(lambda: self._boot(job))

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        """Raises PartialStep for what fails after the first update."""
        with partial_step_guard() as updates:
            return await self._run(lambda: self._step(batch, loss, updates))

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        return await self._run(lambda: self._log_probs(calls, policy))

    async def publish(self, version: int) -> None:
        raise BackendError("this process only trains: nothing samples in it")

    async def load_weights(self, folder: Path, version: int) -> None:
        raise BackendError("this process only trains: nothing samples in it")

    async def export(self, folder: Path) -> None:
        await self._run(lambda: self._export(folder))

    async def save(self, folder: Path) -> None:
        await self._run(lambda: self._workers.save(folder))

    async def restore(self, folder: Path) -> None:
        await self._run(lambda: self._restore(folder))

    def _boot(self, job: TrainJob) -> None:
        """Takes the job's settings; weights and moments stay, so it may come after a restore.
        Raises BackendRefused for what no step of it could carry."""
        # Translated: what fails a step here would fail every one.
        try:
            _refuse_layers(job)
            self._check_reference(job.needs_reference)
            Policy(LossSpec.of(job))
        except BackendError as error:
            raise BackendRefused(str(error)) from None
        self._workers.set_grad_clip(job.grad_clip)
        self._job = job

    def _step(self, batch: Batch, spec: LossSpec, updates: UpdateTracker) -> StepMetrics:
        started = time.perf_counter()
        policy = self._policy_of(spec)
        rows = deal(batch.calls, self._workers.num_workers)
        metrics = {"skipped": 0.0}
        if rows:
            metrics |= self._update(rows, policy, updates, batch.version)
        metrics["tokens"] = float(sum(len(call.response_ids) for call in batch.calls))
        metrics["lr"] = self._job.lr
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    def _update(
        self, rows: list[Call], policy: Policy, updates: UpdateTracker, version: int | None
    ) -> StepMetrics:
        """`ppo_epochs` updates. A loss or gradient that is not finite ends the step without an
        update and is told as it is; what is too far from the engine ends it too."""
        job = self._job
        is_held = policy.spec.kl_loss_coef > 0
        reference = self._pass(rows, "reference") if is_held else None
        data = as_tensordict(rows, self._max_tokens, reference)
        epochs: list[StepMetrics] = []
        # A step that failed may have left its own, and verl adds to what it finds.
        self._workers.drop_gradients()
        for epoch in range(job.ppo_epochs):
            loss, told = self._workers.forward_backward(data)
            log_probs = of_responses(rows, told["log_probs"])
            shown = {"loss": loss} | policy.metrics(rows, log_probs, is_first=epoch == 0)
            if reference is not None:
                shown["kl"] = policy.kl(rows, log_probs, reference)
            epochs.append(shown)
            ended = NO_UPDATE if epoch == 0 else {"skipped": 1.0}
            if epoch == 0:
                shown |= seen(rows, log_probs, of_responses(rows, told["entropy"]), version)
                if is_too_far(shown, job):
                    self._workers.drop_gradients()
                    return {**shown, **TOO_FAR}
            if not math.isfinite(loss):
                self._workers.drop_gradients()
                return mean_of_epochs(epochs) | ended
            updates.begin()
            shown["grad_norm"] = self._workers.optimizer_step(job.lr, job.weight_decay)
            if not math.isfinite(shown["grad_norm"]):  # verl has made no update then
                return mean_of_epochs(epochs) | ended
        return mean_of_epochs(epochs)

    def _policy_of(self, spec: LossSpec) -> Policy:
        self._check_reference(spec.kl_loss_coef > 0)
        if self._policy is None or self._policy.spec != spec:
            policy = Policy(spec)
            self._workers.set_loss(policy.worker_loss())
            self._policy = policy
        return self._policy

    def _check_reference(self, is_asked: bool) -> None:
        if is_asked and not self._has_reference:
            raise BackendError(NO_REFERENCE)

    def _log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        self._check_reference(policy == "reference")
        rows = deal(calls, self._workers.num_workers)
        places = {id(row): place for place, row in enumerate(rows)}
        told = self._pass(rows, policy) if rows else []
        return [told[places[id(call)]].tolist() if call.response_ids else [] for call in calls]

    def _pass(self, rows: list[Call], policy: PolicyName) -> list[Tensor]:
        """Of each row's response tokens."""
        data = as_tensordict(rows, self._max_tokens, is_trained=False)
        return of_responses(rows, self._workers.log_probs(data, policy))

    @property
    def _max_tokens(self) -> int:
        return self._micro_batch_tokens or self._job.micro_batch_tokens

    def _export(self, folder: Path) -> None:
        copy_model_files(self._model, folder, self._export_dtype)
        self._workers.export_weights(folder, self._export_dtype)

    def _restore(self, folder: Path) -> None:
        """Raises BackendError before anything has changed; BackendRefused for one of other workers,
        for an older one of as many would be a step back that nobody asked for."""
        try:
            saved_by: int = json.loads((folder / "fsdp_config.json").read_text())["world_size"]
        except (OSError, ValueError, KeyError) as error:
            raise BackendError(
                f"cannot read checkpoint {folder}, the verl trainer did not write it: {error}"
            ) from error
        if saved_by != self._workers.num_workers:
            raise BackendRefused(
                f"checkpoint {folder} is of {saved_by} workers, and {self._workers.num_workers} "
                f"run: start with --trainer-arg=--num-workers={saved_by}"
            )
        self._workers.load(folder)

    async def _run(self, action: Callable[[], Result]) -> Result:
        return await self._thread.run(lambda: self._or_end(action))

    def _or_end(self, action: Callable[[], Result]) -> Result:
        """Without its workers this process is of no use: the server starts a new one and restores
        what was saved."""
        try:
            return action()
        except WorkersLost as error:
            # Ray may wait for ranks that wait for the lost one.
            closing = threading.Thread(target=self._cluster.close, daemon=True)
            closing.start()
            closing.join(CLOSE_WITHIN_S)
            print(f"the verl trainer ends: {error}", file=sys.stderr, flush=True)
            os._exit(LOST_EXIT_CODE)


def _refuse_layers(job: TrainJob) -> None:
    """The workers' models are made before a job comes."""
    for setting, is_asked, instead in (
        ("lora_rank", job.lora_rank > 0, "it trains all weights"),
        ("gradient_checkpointing", job.gradient_checkpointing, "on accelerators it always does"),
    ):
        if is_asked:
            raise BackendError(
                f"{setting} is not the verl trainer's, {instead}: take it out, or start with "
                "--trainer embedded"
            )
