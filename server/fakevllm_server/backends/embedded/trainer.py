"""Policy-gradient updates of a model of its own, in float32.

Pure torch: no thread, no event loop, no tokenizer. A step is a generator that pauses after every
pass of a piece, so that whoever drives it can do something else in between. The gradient is that of
the step's loss, however the batch is cut and whether or not calls share their prefixes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.backends.base import METRICS, BackendError, Batch, LossSpec, StepMetrics
from fakevllm_server.backends.embedded.passes import FIRST_EPOCH_METRICS, Passes
from fakevllm_server.backends.embedded.pieces import StepPieces, pieces_of
from fakevllm_server.backends.partial_step import Updates, telling_partial
from fakevllm_server.backends.torch_forest.attentions import default_attention
from fakevllm_server.backends.torch_forest.self_check import Verdict, check, compare

log = logging.getLogger("fakevllm.trainer")

ROWS = "rows"
"""Calls one by one."""
NOT_SHARED = "calls share no prefixes in training"
NOT_RIGHT = "this model cannot be trained"


class PolicyTrainer:
    def __init__(
        self, model: PreTrainedModel, load_reference: Callable[[], PreTrainedModel]
    ) -> None:
        """`load_reference` gives the starting weights, when the KL term first needs them."""
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
        self._job = TrainJob()
        self._load_reference = load_reference
        self._reference: PreTrainedModel | None = None
        self._verdicts: dict[str, Verdict] = {}
        """By way through the model: whether it gives what the model itself gives."""

    def boot(self, job: TrainJob) -> None:
        """Takes the job's settings. Weights and the optimiser's moments stay, so it may come after
        a restore.
        """
        self._job = job
        for group in self.optimizer.param_groups:
            group["lr"] = job.lr
            group["weight_decay"] = job.weight_decay

    def step(self, batch: Batch, spec: LossSpec) -> Generator[None, None, StepMetrics]:
        """`ppo_epochs` updates. A loss or gradient that is not finite ends the step without a
        further update. Raises PartialStep for what fails after the first one.
        """
        started = time.perf_counter()
        attention = self._attention()
        step = pieces_of(
            batch.calls,
            spec,
            self._job.micro_batch_tokens,
            self.model.device,
            shares_prefixes=attention != ROWS,
        )
        through = Passes(self.model, attention)
        metrics = dict.fromkeys(METRICS, 0.0) | {"skipped": 0.0}
        try:
            if step.pieces:
                with telling_partial() as updates:
                    metrics |= yield from self._update(step, through, spec, updates)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics["tokens"] = float(sum(len(call.response_ids) for call in batch.calls))
        metrics |= step.metrics
        metrics["lr"] = self._job.lr
        metrics["seconds"] = time.perf_counter() - started
        return {name: value if math.isfinite(value) else 0.0 for name, value in metrics.items()}

    def _attention(self) -> str:
        """Prefixes are shared where the job wants it and this model is shown to take it. Raises
        BackendError for a model whose log-probabilities come out wrong even without."""
        wanted = default_attention(self.model.device)
        if self._job.forest and self._fault(wanted, check) is None:
            return wanted
        fault = self._fault(ROWS, compare)
        if fault is not None:
            raise BackendError(
                f"this model cannot be trained here: {fault}; choose another --model"
            )
        return ROWS

    def _fault(self, attention: str, asked: Callable[[Any, str], Verdict]) -> str | None:
        """Asked once."""
        if attention not in self._verdicts:
            verdict = self._verdicts[attention] = asked(self.model, attention)
            if verdict.fault is not None:
                log.warning("%s: %s", NOT_SHARED if attention != ROWS else NOT_RIGHT, verdict.fault)
        return self._verdicts[attention].fault

    def _update(
        self, step: StepPieces, through: Passes, spec: LossSpec, updates: Updates
    ) -> Generator[None, None, StepMetrics]:
        step = yield from self._with_other_policies(step, through, spec)
        sums: dict[str, float] = defaultdict(float)
        num_epochs = self._job.ppo_epochs
        for epoch in range(num_epochs):
            shown = yield from through.backward(step, spec, is_first=epoch == 0)
            for name, value in shown.items():
                sums[name] += value if name in FIRST_EPOCH_METRICS else value / num_epochs
            grad_norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._job.grad_clip
            ).item()
            if not (math.isfinite(grad_norm) and math.isfinite(sums["loss"])):
                return ({} if epoch == 0 else dict(sums)) | {"skipped": 1.0}
            sums["grad_norm"] += grad_norm / num_epochs
            updates.begin()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return dict(sums)

    def _with_other_policies(
        self, step: StepPieces, through: Passes, spec: LossSpec
    ) -> Generator[None, None, StepPieces]:
        """The log-probabilities of the reference, and of the trainer before its first update."""
        reference: list[Tensor] | None = None
        old: list[Tensor] | None = None
        if spec.kl_loss_coef != 0:
            if self._reference is None:
                self._reference = self._load_reference()
            reference = yield from Passes(self._reference, through.attention).log_probs(step)
        if not spec.bypass_mode:
            old = yield from through.log_probs(step)
        return step.beside(old, reference)
