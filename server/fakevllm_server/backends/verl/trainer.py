"""The verl trainer, which trains a model in Ray workers. It implements TrainEngine, the server's
interface for training."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.checkpoint import copy_model_files
from fakevllm_server.backends.process.child_process import ENDS
from fakevllm_server.backends.process.trainer_thread import SingleThread
from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.torch_losses import DEMONSTRATION_LOSSES, LOSSES
from fakevllm_server.backends.torch_losses.measured_loss import (
    PartMetrics,
    joined_metrics,
    needs_entropy,
)
from fakevllm_server.backends.training.failed_step import UpdateTracker, partial_step_guard
from fakevllm_server.backends.training.lora_settings import LoraSettings, describe_settings
from fakevllm_server.backends.training.mini_batches import mini_batches
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR, is_too_far
from fakevllm_server.backends.training.step_calls import size_metrics, step_demonstrations
from fakevllm_server.backends.training.step_updates import NONE_MADE, StepUpdates
from fakevllm_server.backends.verl.checkpoint_files import check_files
from fakevllm_server.backends.verl.cluster import Cluster
from fakevllm_server.backends.verl.forest_split import WorkerRows, joined_sharing_metrics
from fakevllm_server.backends.verl.released_checkpoint import ReleasedCheckpoint
from fakevllm_server.backends.verl.row_layout import select_responses
from fakevllm_server.backends.verl.step_rows import RowValues, StepRows
from fakevllm_server.backends.verl.tensordict_batch import make_tensordict
from fakevllm_server.backends.verl.trainer_arguments import (
    ADAPTERS_FOLDER,
    read_lora,
    read_num_workers,
    write_settings,
)
from fakevllm_server.backends.verl.worker_group import WorkerGroup, WorkersLost
from fakevllm_server.backends.verl.worker_loss import ENTROPY_COEFFICIENT, direct_inputs
from fakevllm_server.types.backend import (
    BackendError,
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
)
from fakevllm_server.types.weight_transfer import TransferTarget

Result = TypeVar("Result")

LOST_EXIT_CODE = 70
"""Exit code of this process after workers were lost. It differs from 2, the exit code for errors
that the user must fix."""
CLOSE_TIMEOUT_S = 5.0
NO_REFERENCE = (
    "the verl trainer was started without the reference policy that this job needs (for "
    "kl_loss_coef, use_kl_in_reward, dpo or kto): stop the engine, and start it with this job"
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
        lora: LoraSettings | None = None,
        gradient_checkpointing: bool = False,
        start_note: str | None = None,
    ) -> None:
        """Create the trainer. If `micro_batch_tokens` is not None, it overrides the job's setting.
        `has_reference` is True if the workers can compute the reference policy. `lora` has the
        settings of the workers' adapters; None means that they train all weights.
        `gradient_checkpointing` is True if the workers' models use gradient checkpointing.
        `start_note` is a line about the workers for the server's log, or None."""
        self._cluster = cluster
        self._workers = workers
        self._model = model
        self._export_dtype = export_dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._has_reference = has_reference
        self._lora = lora
        self._gradient_checkpointing = gradient_checkpointing
        self._start_note = start_note
        self._job = TrainJob()
        self._sharing_attention: str | None = None
        """The attention method with which calls share prefixes, or ROWS if no such method can be
        used. None before the first boot of a job with `forest`."""
        self._thread = SingleThread("trainer", lambda: None)

    async def boot(self, job: TrainJob) -> str | None:
        """Apply the settings of a job. The first call returns a line for the server's log, if there
        is one about the workers. Raises BackendRefused for settings that the verl trainer does not
        support."""
        await self._run(lambda: self._boot(job))
        note, self._start_note = self._start_note, None
        return note

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

    async def send_weights(self, target: TransferTarget) -> None:
        await self._run(lambda: self._send_weights(target))

    async def export(self, folder: Path) -> None:
        await self._run(lambda: self._export(folder))

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        await self._run(lambda: self._export_adapters(folder, policy))

    async def save(self, folder: Path) -> None:
        await self._run(lambda: self._save(folder))

    async def restore(self, folder: Path) -> None:
        await self._run(lambda: self._restore(folder))

    def _boot(self, job: TrainJob) -> None:
        """Apply the settings of a job. Neither the weights nor the optimizer's moments change.
        Therefore this method may also be called after a restore."""
        # A BackendError here would fail every step of the job, so it becomes a BackendRefused.
        try:
            self._check_model_settings(job)
            self._check_reference(job.needs_reference)
            self._check_loss(LossSpec.of(job))
        except BackendError as error:
            raise BackendRefused(str(error)) from None
        if job.forest and self._sharing_attention is None:
            self._sharing_attention = self._workers.best_sharing_attention()
        self._workers.set_grad_clip(job.grad_clip)
        self._job = job

    def _check_model_settings(self, job: TrainJob) -> None:
        """Raise BackendError if the job needs other models than the workers have. The workers build
        their models when this process starts, so a job cannot change them."""
        lora = LoraSettings.of(job)
        if lora != self._lora:
            raise BackendError(
                f"the verl trainer was started with {describe_settings(self._lora)}, and the job "
                f"has {describe_settings(lora)}: stop the engine, and start it with this job"
            )
        if job.gradient_checkpointing and not self._gradient_checkpointing:
            raise BackendError(
                "the verl trainer was started without the job's gradient_checkpointing: stop the "
                "engine, and start it with this job, without "
                "--trainer-arg=--no-gradient-checkpointing"
            )

    def _step(self, batch: Batch, spec: LossSpec, updates: UpdateTracker) -> StepMetrics:
        started = time.perf_counter()
        self._check_loss(spec)
        parts = [
            StepRows.of(
                part.batch.calls,
                step_demonstrations(part.batch, spec),
                spec,
                self._split,
                batch.version,
                part.share,
            )
            for part in mini_batches(batch, self._job.mini_batch_num)
        ]
        metrics = NONE_MADE | joined_sharing_metrics([part.split for part in parts])
        if any(part.rows for part in parts):
            with self._freed_cache():
                metrics |= self._update(parts, spec, updates)
        metrics |= size_metrics(batch, spec)
        metrics["lr"] = self._job.lr
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    def _update(
        self, parts: Sequence[StepRows], spec: LossSpec, tracker: UpdateTracker
    ) -> StepMetrics:
        """Make `ppo_epochs` updates of the weights with each mini-batch in `parts`, and return the
        metrics of the step.

        If the loss or the gradient norm is not finite, the step makes no more updates. The returned
        metrics then contain this value. If the mismatch between the log-probabilities of rollout
        engine and trainer is above the job's limit, the step makes no update.
        """
        job = self._job
        needs_old = spec.has_policy_loss and not spec.bypass_mode
        if spec.needs_reference:
            parts = [self._with_reference(part) for part in parts]
        # verl adds to existing gradients, and a failed step may have left some.
        self._workers.drop_gradients()
        measured: StepMetrics | None = None
        if spec.has_policy_loss and len(parts) > 1:
            parts, measured = self._measure(parts, needs_old=needs_old)
            if is_too_far(measured, job):
                return {**measured, **TOO_FAR}
            if not math.isfinite(measured["loss"]):
                return {**measured, **NO_UPDATE}
        updates = StepUpdates(measured)
        old = None
        for part in list(parts) * job.ppo_epochs:
            is_first = updates.next_measures
            if old is not None:
                part = part.with_log_probs(old=old)
            values = self._first_pass(part, is_first=is_first)
            metrics = part.metrics(values, is_first=is_first)
            updates.begin(metrics, part.share)
            if is_first and is_too_far(metrics, job):
                self._workers.drop_gradients()
                return {**metrics, **TOO_FAR}
            if not math.isfinite(metrics["loss"]):
                self._workers.drop_gradients()
                return updates.metrics_of_stopped_step
            if part.is_coupled:
                self._second_pass(part, values)
            if is_first and needs_old:
                old = values.log_prob
            tracker.begin()
            metrics["grad_norm"] = self._workers.optimizer_step(job.lr, job.weight_decay)
            if not math.isfinite(metrics["grad_norm"]):  # verl has made no update.
                return updates.metrics_of_stopped_step
            updates.made()
        return updates.metrics

    def _measure(
        self, parts: Sequence[StepRows], *, needs_old: bool
    ) -> tuple[list[StepRows], StepMetrics]:
        """Measure all mini-batches of a step before its first update. Return them with the
        log-probabilities of the old policy if `needs_old` is true, and the metrics of the whole
        step."""
        with_old: list[StepRows] = []
        metrics: list[PartMetrics] = []
        for part in parts:
            values = self._infer(part, is_first=True)
            metrics.append(part.measure(values))
            with_old.append(part.with_log_probs(old=values.log_prob) if needs_old else part)
        return with_old, joined_metrics(metrics)

    def _with_reference(self, part: StepRows) -> StepRows:
        reference = torch.cat(self._response_log_probs(part.split, "reference"))
        return part.with_log_probs(reference=reference)

    @contextmanager
    def _freed_cache(self) -> Generator[None]:
        """Let the workers free torch's cache when the `with` block ends, also after a failure. A
        vLLM on the same GPUs needs the memory when it wakes up. Workers that are lost cannot."""
        try:
            yield
        except WorkersLost:
            raise
        # Raised again, after the cache is freed.
        except Exception:
            self._free_cache()
            raise
        self._free_cache()

    def _free_cache(self) -> None:
        """Let the workers free torch's cache. If they cannot, print a line. Raise WorkersLost if
        they are lost."""
        try:
            self._workers.free_cache()
        # Isolated: the outcome of the step does not depend on the memory that is free after it.
        except BackendError as error:
            print(f"the worker could not free torch's cache: {error}", file=sys.stderr, flush=True)

    def _first_pass(self, step: StepRows, *, is_first: bool) -> RowValues:
        """Return the values from which the loss of a mini-batch follows. If no row depends on
        another row, also add the gradient of the loss to the gradients of the weights. `is_first`
        is true for the step's first update, if it measures what is compared before it."""
        if step.is_coupled:
            return self._infer(step, is_first=is_first)
        data = make_tensordict(
            step.split,
            self._max_tokens,
            spec=step.spec,
            loss_inputs=direct_inputs(step.tokens),
            with_entropy=needs_entropy(step.spec, is_first=is_first),
        )
        return _row_values(step.rows, self._workers.forward_backward(data))

    def _infer(self, step: StepRows, *, is_first: bool) -> RowValues:
        """Return the values from which the loss of a mini-batch follows, without a gradient."""
        with_entropy = needs_entropy(step.spec, is_first=is_first)
        data = make_tensordict(
            step.split, self._max_tokens, spec=step.spec, with_entropy=with_entropy
        )
        return _row_values(step.rows, self._workers.infer(data, "trained"))

    def _second_pass(self, step: StepRows, values: RowValues) -> None:
        """Add the gradient of the loss of a coupled mini-batch to those of the weights. `values`
        are those of its first pass."""
        coefficients = step.coefficients(values)
        data = make_tensordict(
            step.split,
            self._max_tokens,
            spec=step.spec,
            loss_inputs=coefficients,
            with_entropy=ENTROPY_COEFFICIENT in coefficients,
        )
        self._workers.forward_backward(data)

    def _check_loss(self, spec: LossSpec) -> None:
        """Raise BackendError if the workers cannot compute a loss. This check runs before any
        worker does, because all workers are lost if one of them fails."""
        for name in filter(None, (spec.name, spec.of_demonstrations)):
            if name not in LOSSES | DEMONSTRATION_LOSSES:
                raise BackendError(f"the verl trainer has no loss {name!r}: choose another loss")
        self._check_reference(spec.needs_reference)

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
        data = make_tensordict(split, self._max_tokens)
        return select_responses(split.rows, self._workers.infer(data, policy)["log_probs"])

    @property
    def _max_tokens(self) -> int:
        return self._micro_batch_tokens or self._job.micro_batch_tokens

    def _export(self, folder: Path) -> None:
        copy_model_files(self._model, folder, self._export_dtype)
        self._workers.export_weights(folder, self._export_dtype)

    def _send_weights(self, target: TransferTarget) -> None:
        failure = self._workers.send_weights(target, self._export_dtype, self._model)
        if failure is not None:
            raise BackendError(failure)

    def _export_adapters(self, folder: Path, policy: PolicyName) -> None:
        if self._lora is None:
            raise BackendRefused(
                "the verl trainer has no adapters to publish: set lora_rank, stop the engine, and "
                "start it with this job"
            )
        self._workers.export_adapters(folder, policy)

    def _save(self, folder: Path) -> None:
        self._workers.save(folder)
        check_files(folder)
        write_settings(folder, self._workers.num_workers, self._lora)
        if self._lora is not None:
            self._workers.export_adapters(folder / ADAPTERS_FOLDER, "trained")

    def _restore(self, folder: Path) -> None:
        """Load a checkpoint into the workers.

        If files are missing, or if the checkpoint does not fit the model, no weight changes, and
        BackendError is raised. Raises BackendRefused if the checkpoint was saved with other LoRA
        settings. After a BackendRefused, the server does not try an older checkpoint, because that
        would undo training steps without the user's consent.
        """
        try:
            num_saved = read_num_workers(folder)
            lora = read_lora(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BackendError(
                f"checkpoint {folder} cannot be read as one of the verl trainer: {error}"
            ) from error
        if lora != self._lora:
            raise BackendRefused(
                f"checkpoint {folder} has {describe_settings(lora)}, and the verl trainer was "
                f"started with {describe_settings(self._lora)}: keep to what the run began with, "
                "or choose another --run-dir"
            )
        if not ReleasedCheckpoint.is_in(folder):
            check_files(folder)
        fault = self._workers.restore(folder)
        if fault is not None:
            raise BackendError(f"checkpoint {folder} {fault}")
        if num_saved != self._workers.num_workers:
            print(
                f"the checkpoint of {num_saved} workers is divided among "
                f"{self._workers.num_workers}",
                file=sys.stderr,
                flush=True,
            )

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
            # One write, so that Ray's threads write nothing into the line. The server repeats it.
            print(f"\nthe verl trainer {ENDS}{error}\n", end="", file=sys.stderr, flush=True)
            os._exit(LOST_EXIT_CODE)


def _row_values(rows: Sequence[Call], output: Any) -> RowValues:
    """Return the values of the response tokens from the workers' output."""
    has_entropy = "entropy" in output.keys()  # noqa: SIM118 - TensorDict has no `in` of its own
    return RowValues(
        torch.cat(select_responses(rows, output["log_probs"])),
        torch.cat(select_responses(rows, output["entropy"])) if has_entropy else None,
    )
