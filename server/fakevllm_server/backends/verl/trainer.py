"""The verl trainer, which trains a model in Ray workers. It implements TrainEngine, the server's
interface for training."""

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
from fakevllm_server.backends.process.trainer_thread import SingleThread
from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.training.epochs import mean_of_epochs
from fakevllm_server.backends.training.failed_step import UpdateTracker, partial_step_guard
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR, is_too_far
from fakevllm_server.backends.verl.cluster import Cluster
from fakevllm_server.backends.verl.forest_split import WorkerRows
from fakevllm_server.backends.verl.policy_loss import VerlPolicyLoss
from fakevllm_server.backends.verl.step_metrics import first_pass_metrics
from fakevllm_server.backends.verl.tensordict_batch import make_tensordict, select_responses
from fakevllm_server.backends.verl.worker_group import WorkerGroup, WorkersLost
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
"""Exit code of this process after workers were lost. It differs from 2, the exit code for errors
that the user must fix."""
CLOSE_TIMEOUT_S = 5.0
NO_REFERENCE = (
    "the verl trainer was started without the reference policy that this job needs (kl_loss_coef "
    "or use_kl_in_reward): stop the engine, and start it with this job"
)


class VerlTrainer:
    def __init__(
        self,
        cluster: Cluster,
        workers: WorkerGroup,
        model: Path,
        export_dtype: torch.dtype,
        micro_batch_tokens: int | None,
        *,
        has_reference: bool = False,
    ) -> None:
        """Create the trainer. If `micro_batch_tokens` is not None, it overrides the job's setting.
        `has_reference` is True if the workers have kept the weights of the reference policy."""
        self._cluster = cluster
        self._workers = workers
        self._model = model
        self._export_dtype = export_dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._has_reference = has_reference
        self._job = TrainJob()
        self._sharing_attention: str | None = None
        """The attention method with which calls share prefixes, or ROWS if no such method can be
        used. None before the first boot of a job with `forest`."""
        self._loss: VerlPolicyLoss | None = None
        self._thread = SingleThread("trainer", lambda: None)

    async def boot(self, job: TrainJob) -> None:
        await self._run(lambda: self._boot(job))

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        """Run one training step on a batch, and return its metrics. Raises PartialStep if the step
        fails after the weights have begun to change."""
        with partial_step_guard() as updates:
            return await self._run(lambda: self._step(batch, loss, updates))

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        return await self._run(lambda: self._log_probs(calls, policy))

    async def publish(self, version: int) -> None:
        raise BackendError("the verl trainer only trains: it does not sample")

    async def load_weights(self, folder: Path, version: int) -> None:
        raise BackendError("the verl trainer only trains: it does not sample")

    async def export(self, folder: Path) -> None:
        await self._run(lambda: self._export(folder))

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        raise BackendRefused("the verl trainer trains no adapters: take lora_rank out")

    async def save(self, folder: Path) -> None:
        await self._run(lambda: self._workers.save(folder))

    async def restore(self, folder: Path) -> None:
        await self._run(lambda: self._restore(folder))

    def _boot(self, job: TrainJob) -> None:
        """Apply the settings of a job. Neither the weights nor the optimizer's moments change.
        Therefore this method may also be called after a restore.

        Raises BackendRefused for settings that the verl trainer does not support.
        """
        # A BackendError here would fail every step of the job, so it becomes a BackendRefused.
        try:
            _check_model_settings(job)
            self._check_reference(job.needs_reference)
            VerlPolicyLoss(LossSpec.of(job))
        except BackendError as error:
            raise BackendRefused(str(error)) from None
        if job.forest and self._sharing_attention is None:
            self._sharing_attention = self._workers.best_sharing_attention()
        self._workers.set_grad_clip(job.grad_clip)
        self._job = job

    def _step(self, batch: Batch, spec: LossSpec, updates: UpdateTracker) -> StepMetrics:
        started = time.perf_counter()
        loss = self._set_loss(spec)
        split = self._split(batch.calls)
        metrics = {"skipped": 0.0} | split.metrics
        if split.rows:
            metrics |= self._update(split, loss, updates, batch.version)
        metrics["tokens"] = float(sum(len(call.response_ids) for call in batch.calls))
        metrics["lr"] = self._job.lr
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    def _update(
        self,
        split: WorkerRows,
        policy_loss: VerlPolicyLoss,
        updates: UpdateTracker,
        version: int | None,
    ) -> StepMetrics:
        """Make `ppo_epochs` updates of the weights, and return the metrics of the step.

        If the loss or the gradient norm is not finite, the step makes no more updates. The returned
        metrics then contain this value. If the mismatch between the log-probabilities of rollout
        engine and trainer is above the job's limit, the step makes no update.
        """
        job, rows = self._job, split.rows
        has_kl_loss = policy_loss.spec.kl_loss_coef > 0
        reference = self._response_log_probs(split, "reference") if has_kl_loss else None
        data = make_tensordict(split, self._max_tokens, reference)
        epochs: list[StepMetrics] = []
        # verl adds to existing gradients, and a failed step may have left some.
        self._workers.drop_gradients()
        for epoch in range(job.ppo_epochs):
            loss, output = self._workers.forward_backward(data)
            log_probs = select_responses(rows, output["log_probs"])
            metrics = {"loss": loss} | policy_loss.clip_fractions(rows, log_probs)
            if reference is not None:
                metrics["kl"] = policy_loss.kl(rows, log_probs, reference)
            epochs.append(metrics)
            no_further_update = NO_UPDATE if epoch == 0 else {"skipped": 1.0}
            if epoch == 0:
                entropies = select_responses(rows, output["entropy"])
                metrics |= first_pass_metrics(rows, log_probs, entropies, version)
                if is_too_far(metrics, job):
                    self._workers.drop_gradients()
                    return {**metrics, **TOO_FAR}
            if not math.isfinite(loss):
                self._workers.drop_gradients()
                return mean_of_epochs(epochs) | no_further_update
            updates.begin()
            metrics["grad_norm"] = self._workers.optimizer_step(job.lr, job.weight_decay)
            if not math.isfinite(metrics["grad_norm"]):  # verl has made no update.
                return mean_of_epochs(epochs) | no_further_update
        return mean_of_epochs(epochs)

    def _set_loss(self, spec: LossSpec) -> VerlPolicyLoss:
        """Return verl's policy loss for `spec`. If the workers have a different loss, send them the
        loss for `spec`."""
        self._check_reference(spec.kl_loss_coef > 0)
        if self._loss is None or self._loss.spec != spec:
            loss = VerlPolicyLoss(spec)
            self._workers.set_loss(loss.worker_loss())
            self._loss = loss
        return self._loss

    def _check_reference(self, is_needed: bool) -> None:
        if is_needed and not self._has_reference:
            raise BackendError(NO_REFERENCE)

    def _log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        self._check_reference(policy == "reference")
        split = self._split(calls)
        index_of_row = {id(row): index for index, row in enumerate(split.rows)}
        values = self._response_log_probs(split, policy) if split.rows else []
        return [
            values[index_of_row[id(call)]].tolist() if call.response_ids else [] for call in calls
        ]

    def _split(self, calls: Sequence[Call]) -> WorkerRows:
        attention = self._sharing_attention if self._job.forest else None
        return WorkerRows.of(calls, self._workers.num_workers, self._max_tokens, attention or ROWS)

    def _response_log_probs(self, split: WorkerRows, policy: PolicyName) -> list[Tensor]:
        """Return the log-probabilities of the response tokens under `policy`, one tensor [response
        tokens] for each row."""
        data = make_tensordict(split, self._max_tokens, is_trained=False)
        return select_responses(split.rows, self._workers.log_probs(data, policy))

    @property
    def _max_tokens(self) -> int:
        return self._micro_batch_tokens or self._job.micro_batch_tokens

    def _export(self, folder: Path) -> None:
        copy_model_files(self._model, folder, self._export_dtype)
        self._workers.export_weights(folder, self._export_dtype)

    def _restore(self, folder: Path) -> None:
        """Load a checkpoint into the workers.

        If the checkpoint's fsdp_config.json cannot be read, no weight changes, and BackendError is
        raised. Raises BackendRefused if the checkpoint was saved by a different number of workers.
        After a BackendRefused, the server does not try an older checkpoint, because that would undo
        training steps without the user's consent.
        """
        try:
            num_saved: int = json.loads((folder / "fsdp_config.json").read_text())["world_size"]
        except (OSError, ValueError, KeyError) as error:
            raise BackendError(
                f"checkpoint {folder} cannot be read as one of the verl trainer: {error}"
            ) from error
        if num_saved != self._workers.num_workers:
            raise BackendRefused(
                f"checkpoint {folder} was saved by {num_saved} workers, but "
                f"{self._workers.num_workers} run: start with "
                f"--trainer-arg=--num-workers={num_saved}"
            )
        self._workers.load(folder)

    async def _run(self, action: Callable[[], Result]) -> Result:
        return await self._thread.run(lambda: self._exit_if_lost(action))

    def _exit_if_lost(self, action: Callable[[], Result]) -> Result:
        """Run an action and return its result. If the action fails because workers are lost, end
        this process. The server then starts a new process, which restores the latest checkpoint."""
        try:
            return action()
        except WorkersLost as error:
            # Closing may never end, because Ray may wait for ranks that wait for the lost rank.
            closing = threading.Thread(target=self._cluster.close, daemon=True)
            closing.start()
            closing.join(CLOSE_TIMEOUT_S)
            print(f"the verl trainer ends: {error}", file=sys.stderr, flush=True)
            os._exit(LOST_EXIT_CODE)


def _check_model_settings(job: TrainJob) -> None:
    """Raise BackendError if the job sets LoRA or gradient checkpointing. The workers build their
    models before the job is known, so a job cannot change the model."""
    for setting, is_set, reason in (
        ("lora_rank", job.lora_rank > 0, "because it trains all weights"),
        (
            "gradient_checkpointing",
            job.gradient_checkpointing,
            "because it is always on for accelerators",
        ),
    ):
        if is_set:
            raise BackendError(
                f"the verl trainer does not support {setting}, {reason}: remove it, or start with "
                "--trainer embedded"
            )
