"""Policy-gradient updates of a model of its own, in float32.

Pure torch: no thread, no event loop, no tokenizer. A step is a generator that pauses after every
micro-batch, so that whoever drives it can do something else in between. The gradient is that of the
step's loss, however the batch is cut.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fakevllm_adapters.swarm import TrainJob
from fakevllm_server.backends.base import METRICS, Batch, LossSpec, StepMetrics
from fakevllm_server.backends.embedded.micro_batches import (
    MicroBatch,
    collate,
    cut,
    shares_of,
    unit_of,
)
from fakevllm_server.backends.partial_step import Updates, telling_partial
from fakevllm_server.backends.torch_losses.kl import k3
from fakevllm_server.backends.torch_losses.step_loss import step_loss, token_means
from fakevllm_server.backends.torch_losses.tokens import Tokens


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

    def boot(self, job: TrainJob) -> None:
        """Takes the job's settings. Weights and the optimiser's moments stay, so it may come after
        a restore.
        """
        self._job = job
        for group in self.optimizer.param_groups:
            group["lr"] = job.lr
            group["weight_decay"] = job.weight_decay

    def step(self, batch: Batch, spec: LossSpec) -> Generator[None, None, StepMetrics]:
        """`ppo_epochs` updates. A loss or gradient that is not finite ends the step without an
        update. Raises PartialStep for what fails after the first one.
        """
        started = time.perf_counter()
        shares = shares_of(batch.calls, spec)
        together = unit_of if spec.couples_tokens else id
        pieces = [
            collate(calls, [shares[id(call)] for call in calls], self.model.device)
            for calls in cut(batch.calls, self._job.micro_batch_tokens, together)
        ]
        metrics = dict.fromkeys(METRICS, 0.0) | {"skipped": 0.0}
        try:
            if pieces:
                with telling_partial() as updates:
                    metrics |= yield from self._update(pieces, spec, updates)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics["tokens"] = float(sum(len(call.response_ids) for call in batch.calls))
        metrics["lr"] = self._job.lr
        metrics["seconds"] = time.perf_counter() - started
        return {name: value if math.isfinite(value) else 0.0 for name, value in metrics.items()}

    def _update(
        self, pieces: Sequence[MicroBatch], spec: LossSpec, updates: Updates
    ) -> Generator[None, None, StepMetrics]:
        pieces = yield from self._with_other_policies(pieces, spec)
        sums: dict[str, float] = defaultdict(float)
        num_epochs = self._job.ppo_epochs
        for epoch in range(num_epochs):
            for piece in pieces:
                shown = self._backward(piece, spec, is_first=epoch == 0)
                for name, value in shown.items():
                    if name == LARGEST:
                        sums[name] = max(sums[name], value)
                    else:
                        sums[name] += value if name in FIRST_EPOCH_METRICS else value / num_epochs
                yield
            grad_norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._job.grad_clip
            ).item()
            if not (math.isfinite(grad_norm) and math.isfinite(sums["loss"])):
                return {"skipped": 1.0}
            sums["grad_norm"] += grad_norm / num_epochs
            updates.begin()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return dict(sums)

    def _backward(self, piece: MicroBatch, spec: LossSpec, *, is_first: bool) -> StepMetrics:
        """Adds this piece's part of the step's gradient; returns its parts of the metrics."""
        logits = self._logits(self.model, piece)
        log_prob = _chosen(logits, piece.targets)[piece.mask]
        entropy = None
        if spec.entropy_coeff != 0 or is_first:
            with torch.set_grad_enabled(spec.entropy_coeff != 0):
                entropy = _entropy(logits)[piece.mask]
        loss, shown = step_loss(log_prob, piece.tokens, spec, entropy)
        loss.backward()
        shares = {name: value.item() for name, value in shown.items()}
        if is_first and entropy is not None:
            shares |= _first_look(log_prob.detach(), entropy, piece.tokens)
        return shares | {"loss": loss.item()}

    def _with_other_policies(
        self, pieces: Sequence[MicroBatch], spec: LossSpec
    ) -> Generator[None, None, list[MicroBatch]]:
        """The log-probabilities of the reference, and of the trainer before its first update."""
        if spec.kl_loss_coef != 0 and self._reference is None:
            self._reference = self._load_reference()
        found: list[MicroBatch] = []
        for piece in pieces:
            tokens = piece.tokens
            if spec.kl_loss_coef != 0 and self._reference is not None:
                reference = self._log_probs(self._reference, piece)
                tokens = replace(tokens, reference_log_prob=reference)
                yield
            if not spec.bypass_mode:
                tokens = replace(tokens, old_log_prob=self._log_probs(self.model, piece))
                yield
            found.append(replace(piece, tokens=tokens))
        return found

    @torch.no_grad()
    def _log_probs(self, model: PreTrainedModel, piece: MicroBatch) -> Tensor:
        return _chosen(self._logits(model, piece), piece.targets)[piece.mask]

    def _logits(self, model: PreTrainedModel, piece: MicroBatch) -> Tensor:
        """[rows, scored, vocabulary], divided by each call's temperature."""
        network: Any = model
        kept = piece.ids.shape[1] - piece.first_scored
        output = network(input_ids=piece.ids, use_cache=False, logits_to_keep=kept)
        return output.logits[:, :-1] / piece.temperature[:, :, None]


FIRST_EPOCH_METRICS = frozenset({"mismatch", "approx_kl", "ppo_kl", "entropy"})
"""About the policy that sampled, so measured before any update."""
LARGEST = "prob_diff_max"
"""Of all tokens, before any update: how far apart engine and trainer see one probability."""


def _first_look(log_prob: Tensor, entropy: Tensor, tokens: Tokens) -> StepMetrics:
    """How trainer and engine differ: this piece's parts of the means, and the largest."""
    sampled = tokens.sampled_log_prob
    means = {
        "mismatch": (log_prob - sampled).abs(),
        "approx_kl": k3(sampled, log_prob),
        "ppo_kl": sampled - log_prob,
        "entropy": entropy,
    }
    difference = (log_prob.exp() - sampled.exp()).abs()[tokens.counted]
    largest = difference.max().item() if difference.numel() else 0.0
    return {k: v.item() for k, v in token_means(means, tokens).items()} | {LARGEST: largest}


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target: [rows, scored]."""
    return logits.gather(2, targets[:, :, None])[:, :, 0] - logits.logsumexp(-1)


def _entropy(logits: Tensor) -> Tensor:
    """nats, [rows, scored]"""
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)
