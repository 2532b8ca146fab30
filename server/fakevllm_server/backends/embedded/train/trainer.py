"""Policy-gradient updates of a model with float32 weights.

A training step is a generator. The batch is cut into pieces, and the generator yields after each
pass of a piece. In between, the caller can do other work. This module uses no threads, no event
loop and no tokenizer. The gradient of a step is the exact gradient of its loss. The gradient does
not depend on how the batch is cut into pieces, or on which prefixes the calls share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.lora import (
    describe_trainable,
    insert_adapters,
    without_adapters,
)
from fakevllm_server.backends.embedded.train.attention_choice import AttentionChoice
from fakevllm_server.backends.embedded.train.batch_check import token_fidelity
from fakevllm_server.backends.embedded.train.forward_backward import Passes
from fakevllm_server.backends.embedded.train.gradient_checkpointing import (
    set_gradient_checkpointing,
)
from fakevllm_server.backends.embedded.train.micro_batches import StepPieces, cut_into_pieces
from fakevllm_server.backends.embedded.train.prefix_sharing_speedup import SharingSpeedup
from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.torch_forest.autocast import set_compute_dtype
from fakevllm_server.backends.torch_losses.measured_loss import PartMetrics, joined_metrics
from fakevllm_server.backends.training.failed_step import UpdateTracker, partial_step_guard
from fakevllm_server.backends.training.lora_settings import LoraSettings, describe_settings
from fakevllm_server.backends.training.mini_batches import MiniBatch, mini_batches
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR, is_too_far
from fakevllm_server.backends.training.step_calls import (
    demonstration_calls,
    size_metrics,
    step_demonstrations,
)
from fakevllm_server.backends.training.step_updates import NONE_MADE, StepUpdates
from fakevllm_server.types.backend import (
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
)
from fakevllm_server.types.demonstrations import Demonstration


@dataclass(frozen=True, slots=True)
class PlannedMiniBatch:
    """A mini-batch of a training step, cut into pieces (sets of calls that go through the model
    together)."""

    calls: Sequence[Call]
    """The sampled calls, and the demonstrations as calls."""
    step: StepPieces
    share: float
    """Share of the step's tokens that are in the mini-batch."""


class PolicyTrainer:
    """Trainer of one model. The trainer holds the model's optimizer. If the reference policy is
    needed and all weights are trained, the trainer also holds the weights of the reference
    policy."""

    def __init__(
        self,
        model: PreTrainedModel,
        load_reference: Callable[[], PreTrainedModel],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Create a trainer of `model`. `load_reference` returns a new model with the starting
        weights. The trainer calls `load_reference` when the reference policy is needed for the
        first time. With LoRA, the trainer never calls it, because the model without its adapters
        has the starting weights. `dtype` is the dtype in which the model computes. The weights keep
        their own dtype."""
        self.model = model
        self.lora: LoraSettings | None = None
        """Settings of the adapters that are trained; None if all weights are trained."""
        self.optimizer = _optimizer(model)
        self._dtype = dtype
        set_compute_dtype(model, dtype)
        self._lora_source: str | None = None
        """Name of the job or checkpoint that decided `lora`; None before the decision."""
        self._job = TrainJob()
        self._load_reference = load_reference
        self._reference: PreTrainedModel | None = None
        self._sharing_speedup = SharingSpeedup()
        self._attention_choice = AttentionChoice()

    def boot(self, job: TrainJob) -> str:
        """Apply the settings of a job, and choose and check the attention method. Return a
        description of the weights that are trained.

        This method may be called again for another job, and after `restore`. A repeated call
        changes neither the weights nor the optimizer's moments. Raises BackendRefused if the job
        does not fit the model. Raises BackendRefused as well if the job's LoRA settings differ from
        those of an earlier job or of the restored checkpoint.
        """
        self.set_lora(LoraSettings.of(job), "the job", job.seed)
        if set_gradient_checkpointing(self.model, job.gradient_checkpointing):
            self._attention_choice.reset()
        self._job = job
        for group in self.optimizer.param_groups:
            group["lr"] = job.lr
            group["weight_decay"] = job.weight_decay
        # The check runs here, after the job has changed the model and before calls are collected
        # for a step.
        self._attention()
        dtype = str(self._dtype).removeprefix("torch.")
        trained = describe_trainable(self.model, self.lora)
        return f"trains {trained}, in {dtype} on {self.model.device}"

    def set_lora(self, lora: LoraSettings | None, source: str, seed: int = 0) -> None:
        """Choose the weights that are trained. These are new adapters with the settings `lora`, or
        all weights if `lora` is None. The choice is final for the run.

        `source` is the name of the job or checkpoint for error messages. `seed` is the random seed
        for the initial values of new adapters. If an earlier choice was different, no weight
        changes, and BackendRefused is raised.
        """
        if self._lora_source is not None and lora != self.lora:
            raise BackendRefused(
                f"{source} has {describe_settings(lora)}, and {self._lora_source} has "
                f"{describe_settings(self.lora)}: keep to what the run began with, or choose "
                "another --run-dir"
            )
        if lora is not None and self.lora is None:
            insert_adapters(self.model, lora, seed)
            set_compute_dtype(self.model, self._dtype)
            self.optimizer = _optimizer(self.model)
            self._attention_choice.reset()
        self.lora, self._lora_source = lora, source

    def step(self, batch: Batch, spec: LossSpec) -> Generator[None, None, StepMetrics]:
        """Run one training step, and return its metrics. The batch is divided into
        `mini_batch_num` mini-batches. Each of them makes `ppo_epochs` updates of the weights.
        Metrics that were not measured are left out.

        If the loss or the gradient norm is not finite, the step ends without further updates. The
        metrics then contain the value that is not finite. If the mismatch between the
        log-probabilities of rollout engine and trainer is above the job's limit, the step makes no
        update. Raises FidelityError, before any update, if the tokens to train differ from the
        recorded tokens of the calls. Raises PartialStep if the step fails after the weights have
        begun to change.
        """
        started = time.perf_counter()
        job, passes = self._job, self._passes()
        parts = [
            self._plan_mini_batch(part, spec, passes)
            for part in mini_batches(batch, job.mini_batch_num)
        ]
        fidelity = min(token_fidelity(part.step, part.calls) for part in parts)
        metrics = {**NONE_MADE, "token_fidelity": fidelity}
        try:
            if any(part.step.pieces for part in parts):
                with partial_step_guard() as updates:
                    metrics |= yield from self._update(parts, passes, spec, updates)
            metrics["seconds"] = time.perf_counter() - started
            yield from self._sharing_speedup.measure(
                parts[0].step, parts[0].calls, passes, job.micro_batch_tokens
            )
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics |= self._sharing_speedup.metrics | size_metrics(batch, spec)
        metrics["lr"] = job.lr
        whole = StepPieces([piece for part in parts for piece in part.step.pieces], None)
        return metrics | whole.metrics

    def log_probs(
        self, calls: Sequence[Call], policy: PolicyName
    ) -> Generator[None, None, list[list[float]]]:
        """Return the log-probabilities of each call's trained tokens at the call's temperature.
        `policy` selects the current policy or the reference policy.

        A log-probability is normalized over the tokens that could be sampled at its position.
        """
        passes = self._passes()
        step = self._plan(calls, LossSpec(), passes)
        if policy == "reference":
            log_probs = yield from self._reference_log_probs(step, passes)
        else:
            log_probs = yield from passes.log_probs(step)
        return step.per_call(log_probs)

    def _plan_mini_batch(self, part: MiniBatch, spec: LossSpec, passes: Passes) -> PlannedMiniBatch:
        batch = part.batch
        demonstrations = step_demonstrations(batch, spec)
        calls = [*batch.calls, *demonstration_calls(demonstrations)]
        step = self._plan(calls, spec, passes, batch.version, demonstrations)
        return PlannedMiniBatch(calls, step, part.share)

    def _plan(
        self,
        calls: Sequence[Call],
        spec: LossSpec,
        passes: Passes,
        version: int | None = None,
        demonstrations: Sequence[Demonstration] = (),
    ) -> StepPieces:
        return cut_into_pieces(
            calls,
            spec,
            self._job.micro_batch_tokens,
            self.model.device,
            shares_prefixes=passes.attention != ROWS,
            version=version,
            demonstrations=demonstrations,
        )

    def _passes(self) -> Passes:
        return Passes(self.model, self._attention())

    def _attention(self) -> str:
        return self._attention_choice.best(self.model, self._job.forest)

    def _update(
        self,
        parts: Sequence[PlannedMiniBatch],
        passes: Passes,
        spec: LossSpec,
        tracker: UpdateTracker,
    ) -> Generator[None, None, StepMetrics]:
        """Make the updates of a step, and return their metrics. `parts` are the mini-batches. If
        there are several, a pass over all of them before the first update measures what is compared
        before it, and gets the log-probabilities of the old policy."""
        if spec.needs_reference:
            parts = yield from self._with_reference(parts, passes)
        measured: StepMetrics | None = None
        if spec.has_policy_loss and len(parts) > 1:
            parts, measured = yield from self._measure(parts, passes, spec)
            if is_too_far(measured, self._job):
                return {**measured, **TOO_FAR}
            if not math.isfinite(measured["loss"]):
                return {**measured, **NO_UPDATE}
        elif spec.has_policy_loss and not spec.bypass_mode:
            parts = yield from self._with_old(parts, passes)
        updates = StepUpdates(measured)
        for part in list(parts) * self._job.ppo_epochs:
            is_first = updates.next_measures
            metrics = yield from passes.backward(part.step, spec, is_first=is_first)
            updates.begin(metrics, part.share)
            if is_first and is_too_far(metrics, self._job):
                return {**metrics, **TOO_FAR}
            metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._job.grad_clip
            ).item()
            if not (math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"])):
                return updates.metrics_of_stopped_step
            tracker.begin()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            updates.made()
        return updates.metrics

    def _measure(
        self, parts: Sequence[PlannedMiniBatch], passes: Passes, spec: LossSpec
    ) -> Generator[None, None, tuple[list[PlannedMiniBatch], StepMetrics]]:
        """Measure all mini-batches of a step before its first update. Return them with the
        log-probabilities of the old policy as far as the loss needs them, and the metrics of the
        whole step."""
        with_old: list[PlannedMiniBatch] = []
        metrics: list[PartMetrics] = []
        for part in parts:
            log_probs, of_part = yield from passes.measure(part.step, spec)
            metrics += [one.scaled(part.share) for one in of_part]
            step = part.step if spec.bypass_mode else part.step.with_old(log_probs)
            with_old.append(replace(part, step=step))
        return with_old, joined_metrics(metrics)

    def _with_old(
        self, parts: Sequence[PlannedMiniBatch], passes: Passes
    ) -> Generator[None, None, list[PlannedMiniBatch]]:
        """Return copies of the mini-batches with the log-probabilities of the old policy, which is
        the trainer's policy before the step's first update."""
        with_old: list[PlannedMiniBatch] = []
        for part in parts:
            log_probs = yield from passes.log_probs(part.step)
            with_old.append(replace(part, step=part.step.with_old(log_probs)))
        return with_old

    def _with_reference(
        self, parts: Sequence[PlannedMiniBatch], passes: Passes
    ) -> Generator[None, None, list[PlannedMiniBatch]]:
        """Return copies of the mini-batches with the log-probabilities of the reference policy,
        which a KL term, `dpo` and `kto` need."""
        with_reference: list[PlannedMiniBatch] = []
        for part in parts:
            log_probs = yield from self._reference_log_probs(part.step, passes)
            with_reference.append(replace(part, step=part.step.with_reference(log_probs)))
        return with_reference

    def _reference_log_probs(
        self, step: StepPieces, passes: Passes
    ) -> Generator[None, None, list[Tensor]]:
        """Return the log-probabilities of the trained tokens under the starting weights. The result
        has one tensor [tokens] for each piece (part of the batch) of `step`."""
        if self.lora is None:
            if self._reference is None:
                self._reference = self._load_reference()
                set_compute_dtype(self._reference, self._dtype)
            return (yield from Passes(self._reference, passes.attention).log_probs(step))
        running = passes.log_probs(step)
        while True:
            # The adapters are disabled only while this generator runs, and not while it is paused.
            with without_adapters(self.model):
                try:
                    next(running)
                except StopIteration as stop:
                    return stop.value
            yield


def _optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, betas=(0.9, 0.95))
