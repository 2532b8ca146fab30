"""Policy-gradient updates of a model of its own, whose weights are float32.

Pure torch: no thread, no event loop, no tokenizer. A step is a generator that pauses after every
pass of a piece, so that whoever drives it can do something else in between. The gradient is that of
the step's loss, however the batch is cut and whether or not calls share their prefixes.
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
    LoraSettings,
    describe_settings,
    describe_trainable,
    insert_adapters,
    without_adapters,
)
from fakevllm_server.backends.embedded.train.attention_choice import AttentionChoice
from fakevllm_server.backends.embedded.train.batch_check import token_fidelity
from fakevllm_server.backends.embedded.train.gradient_checkpointing import (
    set_gradient_checkpointing,
)
from fakevllm_server.backends.embedded.train.passes import Passes
from fakevllm_server.backends.embedded.train.sharing_speedup import SharingSpeedup
from fakevllm_server.backends.embedded.train.step_pieces import StepPieces, cut_into_pieces
from fakevllm_server.backends.torch_forest.attentions import ROWS
from fakevllm_server.backends.torch_forest.precision import set_compute_dtype
from fakevllm_server.backends.training.epochs import mean_of_epochs
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR, is_too_far
from fakevllm_server.backends.training.partial_step import UpdateTracker, partial_step_guard
from fakevllm_server.types.backend import (
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
)


class PolicyTrainer:
    def __init__(
        self,
        model: PreTrainedModel,
        load_reference: Callable[[], PreTrainedModel],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`load_reference` gives the starting weights, when a KL first needs them and adapters do
        not leave them as they are. `dtype` is that of the passes, not of the weights."""
        self.model = model
        self.lora: LoraSettings | None = None
        """The adapters that train; None where all weights do."""
        self.optimizer = _optimizer(model)
        self._dtype = dtype
        set_compute_dtype(model, dtype)
        self._settled_by: str | None = None
        """Who said what trains, where that has been said."""
        self._job = TrainJob()
        self._load_reference = load_reference
        self._reference: PreTrainedModel | None = None
        self._saving = SharingSpeedup()
        self._ways = AttentionChoice()

    def boot(self, job: TrainJob) -> str:
        """Takes the job's settings, checks how calls go through the model, and says what it trains.
        Weights and the optimiser's moments stay, so it may come after a restore. Raises
        BackendRefused for what contradicts an earlier boot or restore, or does not fit the model.
        """
        self.settle(LoraSettings.of(job), "the job", job.seed)
        if set_gradient_checkpointing(self.model, job.gradient_checkpointing):
            self._ways.forget()
        self._job = job
        for group in self.optimizer.param_groups:
            group["lr"] = job.lr
            group["weight_decay"] = job.weight_decay
        # With all that the job puts into the model, and before anything is collected for a step.
        self._attention()
        dtype = str(self._dtype).removeprefix("torch.")
        return (
            f"trains {describe_trainable(self.model, self.lora)}, in {dtype} on {self.model.device}"
        )

    def settle(self, lora: LoraSettings | None, told_by: str, seed: int = 0) -> None:
        """What trains, once for all; `seed` is of what adapters begin with. Raises BackendRefused
        before anything has changed."""
        if self._settled_by is not None and lora != self.lora:
            raise BackendRefused(
                f"{told_by} has {describe_settings(lora)}, and {self._settled_by} has "
                f"{describe_settings(self.lora)}: keep "
                "to what the run began with, or choose another --run-dir"
            )
        if lora is not None and self.lora is None:
            insert_adapters(self.model, lora, seed)
            set_compute_dtype(self.model, self._dtype)
            self.optimizer = _optimizer(self.model)
            self._ways.forget()
        self.lora, self._settled_by = lora, told_by

    def step(self, batch: Batch, spec: LossSpec) -> Generator[None, None, StepMetrics]:
        """`ppo_epochs` updates. A loss or gradient that is not finite ends the step without a
        further update and is told as it is; one that is too far from the engine makes none. What
        was not measured is not told. Raises FidelityError for tokens that are not the engine's,
        PartialStep for what fails after the first update.
        """
        started = time.perf_counter()
        step, through = self._planned(batch.calls, spec, batch.version)
        metrics = {"skipped": 0.0, "token_fidelity": token_fidelity(step, batch.calls)}
        try:
            if step.pieces:
                with partial_step_guard() as updates:
                    metrics |= yield from self._update(step, through, spec, updates)
            metrics["seconds"] = time.perf_counter() - started
            yield from self._saving.after(step, batch.calls, through, self._job.micro_batch_tokens)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics |= self._saving.metrics
        metrics["tokens"] = float(sum(call.num_trained for call in batch.calls))
        metrics["lr"] = self._job.lr
        return metrics | step.metrics

    def log_probs(
        self, calls: Sequence[Call], policy: PolicyName
    ) -> Generator[None, None, list[list[float]]]:
        """Of each trained token of each response, as it was chosen."""
        step, through = self._planned(calls, LossSpec())
        is_reference = policy == "reference"
        passes = self._of_reference(step, through) if is_reference else through.log_probs(step)
        return step.per_call((yield from passes))

    def _planned(
        self, calls: Sequence[Call], spec: LossSpec, version: int | None = None
    ) -> tuple[StepPieces, Passes]:
        attention = self._attention()
        step = cut_into_pieces(
            calls,
            spec,
            self._job.micro_batch_tokens,
            self.model.device,
            shares_prefixes=attention != ROWS,
            version=version,
        )
        return step, Passes(self.model, attention)

    def _attention(self) -> str:
        return self._ways.best(self.model, self._job.forest)

    def _update(
        self, step: StepPieces, through: Passes, spec: LossSpec, updates: UpdateTracker
    ) -> Generator[None, None, StepMetrics]:
        step = yield from self._with_other_policies(step, through, spec)
        epochs: list[StepMetrics] = []
        for epoch in range(self._job.ppo_epochs):
            shown = yield from through.backward(step, spec, is_first=epoch == 0)
            epochs.append(shown)
            if epoch == 0 and is_too_far(shown, self._job):
                return {**shown, **TOO_FAR}
            shown["grad_norm"] = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._job.grad_clip
            ).item()
            if not (math.isfinite(shown["grad_norm"]) and math.isfinite(shown["loss"])):
                return mean_of_epochs(epochs) | (NO_UPDATE if epoch == 0 else {"skipped": 1.0})
            updates.begin()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return mean_of_epochs(epochs)

    def _with_other_policies(
        self, step: StepPieces, through: Passes, spec: LossSpec
    ) -> Generator[None, None, StepPieces]:
        """The log-probabilities of the reference, and of the trainer before its first update."""
        reference: list[Tensor] | None = None
        old: list[Tensor] | None = None
        if spec.kl_loss_coef != 0:
            reference = yield from self._of_reference(step, through)
        if not spec.bypass_mode:
            old = yield from through.log_probs(step)
        return step.beside(old, reference)

    def _of_reference(
        self, step: StepPieces, through: Passes
    ) -> Generator[None, None, list[Tensor]]:
        """Log-probabilities under the starting weights."""
        if self.lora is None:
            if self._reference is None:
                self._reference = self._load_reference()
                set_compute_dtype(self._reference, self._dtype)
            return (yield from Passes(self._reference, through.attention).log_probs(step))
        passes = through.log_probs(step)
        while True:
            with without_adapters(self.model):
                try:
                    next(passes)
                except StopIteration as stop:
                    return stop.value
            yield


def _optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, betas=(0.9, 0.95))
