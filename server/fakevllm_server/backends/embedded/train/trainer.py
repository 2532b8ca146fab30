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
from fakevllm_server.backends.training.epochs import mean_of_epochs
from fakevllm_server.backends.training.failed_step import UpdateTracker, partial_step_guard
from fakevllm_server.backends.training.lora_settings import LoraSettings, describe_settings
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR, is_too_far
from fakevllm_server.backends.training.step_calls import (
    demonstration_calls,
    size_metrics,
    step_demonstrations,
)
from fakevllm_server.types.backend import (
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
)
from fakevllm_server.types.demonstrations import Demonstration


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
        """Run one training step with `ppo_epochs` updates of the weights, and return its metrics.
        Metrics that were not measured are left out.

        If the loss or the gradient norm is not finite, the step ends without further updates. The
        metrics then contain the value that is not finite. If the mismatch between the
        log-probabilities of rollout engine and trainer is above the job's limit, the step makes no
        update. Raises FidelityError, before any update, if the tokens to train differ from the
        recorded tokens of the calls. Raises PartialStep if the step fails after the weights have
        begun to change.
        """
        started = time.perf_counter()
        demonstrations = step_demonstrations(batch, spec)
        calls = [*batch.calls, *demonstration_calls(demonstrations)]
        step, passes = self._plan(calls, spec, batch.version, demonstrations)
        metrics = {"skipped": 0.0, "token_fidelity": token_fidelity(step, calls)}
        try:
            if step.pieces:
                with partial_step_guard() as updates:
                    metrics |= yield from self._update(step, passes, spec, updates)
            metrics["seconds"] = time.perf_counter() - started
            max_tokens = self._job.micro_batch_tokens
            yield from self._sharing_speedup.measure(step, calls, passes, max_tokens)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics |= self._sharing_speedup.metrics | size_metrics(batch, spec)
        metrics["lr"] = self._job.lr
        return metrics | step.metrics

    def log_probs(
        self, calls: Sequence[Call], policy: PolicyName
    ) -> Generator[None, None, list[list[float]]]:
        """Return the log-probabilities of each call's trained tokens at the call's temperature.
        `policy` selects the current policy or the reference policy.

        A log-probability is normalized over the tokens that could be sampled at its position.
        """
        step, passes = self._plan(calls, LossSpec())
        if policy == "reference":
            log_probs = yield from self._reference_log_probs(step, passes)
        else:
            log_probs = yield from passes.log_probs(step)
        return step.per_call(log_probs)

    def _plan(
        self,
        calls: Sequence[Call],
        spec: LossSpec,
        version: int | None = None,
        demonstrations: Sequence[Demonstration] = (),
    ) -> tuple[StepPieces, Passes]:
        attention = self._attention()
        step = cut_into_pieces(
            calls,
            spec,
            self._job.micro_batch_tokens,
            self.model.device,
            shares_prefixes=attention != ROWS,
            version=version,
            demonstrations=demonstrations,
        )
        return step, Passes(self.model, attention)

    def _attention(self) -> str:
        return self._attention_choice.best(self.model, self._job.forest)

    def _update(
        self, step: StepPieces, passes: Passes, spec: LossSpec, updates: UpdateTracker
    ) -> Generator[None, None, StepMetrics]:
        step = yield from self._with_other_policies(step, passes, spec)
        epochs: list[StepMetrics] = []
        for epoch in range(self._job.ppo_epochs):
            metrics = yield from passes.backward(step, spec, is_first=epoch == 0)
            epochs.append(metrics)
            if epoch == 0 and is_too_far(metrics, self._job):
                return {**metrics, **TOO_FAR}
            metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._job.grad_clip
            ).item()
            if not (math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"])):
                return mean_of_epochs(epochs) | (NO_UPDATE if epoch == 0 else {"skipped": 1.0})
            updates.begin()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return mean_of_epochs(epochs)

    def _with_other_policies(
        self, step: StepPieces, passes: Passes, spec: LossSpec
    ) -> Generator[None, None, StepPieces]:
        """Return a copy of `step` with the log-probabilities of other policies, as far as the loss
        needs them. A KL term, `dpo` and `kto` need the log-probabilities of the reference policy.
        If `bypass_mode` is off, the policy loss also needs the log-probabilities of the trainer's
        policy before the step's first update."""
        reference: list[Tensor] | None = None
        old: list[Tensor] | None = None
        if spec.needs_reference:
            reference = yield from self._reference_log_probs(step, passes)
        if spec.has_policy_loss and not spec.bypass_mode:
            old = yield from passes.log_probs(step)
        return step.with_log_probs(old, reference)

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
