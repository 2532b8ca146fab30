"""Policy-gradient updates of a model of its own, in float32.

Pure torch: no thread, no event loop, no tokenizer. A step is a generator that pauses after every
micro-batch, so that whoever drives it can do something else in between. The gradient is of the mean
over all response tokens of the batch, weighted by each call's weight, however the batch is cut.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fakevllm_adapters.swarm import TrainJob
from fakevllm_server.backends.base import METRICS, Batch, LossSpec, StepMetrics
from fakevllm_server.backends.embedded.micro_batches import MicroBatch, collate, cut, total_weight
from fakevllm_server.backends.partial_step import Updates, telling_partial
from fakevllm_server.backends.torch_losses import LOSSES
from fakevllm_server.backends.torch_losses.aggregate import token_mean
from fakevllm_server.backends.torch_losses.kl import k3


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
        pieces = [
            collate(calls, self.model.device)
            for calls in cut(batch.calls, self._job.micro_batch_tokens)
        ]
        metrics = dict.fromkeys(METRICS, 0.0) | {"skipped": 0.0}
        try:
            if pieces:
                with telling_partial() as updates:
                    total = total_weight(batch.calls)
                    metrics |= yield from self._update(pieces, spec, total, updates)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics["tokens"] = float(sum(len(call.response_ids) for call in batch.calls))
        metrics["lr"] = self._job.lr
        metrics["seconds"] = time.perf_counter() - started
        return {name: value if math.isfinite(value) else 0.0 for name, value in metrics.items()}

    def _update(
        self, pieces: Sequence[MicroBatch], spec: LossSpec, total: float, updates: Updates
    ) -> Generator[None, None, StepMetrics]:
        references = yield from self._reference_log_probs(pieces, spec)
        sums: dict[str, float] = defaultdict(float)
        num_epochs = self._job.ppo_epochs
        for epoch in range(num_epochs):
            for piece, reference in zip(pieces, references, strict=True):
                for name, value in self._backward(
                    piece, reference, spec, total, is_first=epoch == 0
                ).items():
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

    def _backward(
        self,
        piece: MicroBatch,
        reference: Tensor | None,
        spec: LossSpec,
        total: float,
        *,
        is_first: bool,
    ) -> dict[str, float]:
        """Adds this piece's share of the batch's gradient; returns its shares of the metrics."""
        logits = self._logits(self.model, piece)
        log_prob = _chosen(logits, piece.targets)
        # The engine's log-probabilities are the old policy: one forward less, and no mismatch goes
        # unseen.
        policy = LOSSES[spec.name](log_prob, piece.old_log_prob, piece.advantages, piece.mask, spec)
        per_token = policy.per_token
        shown = {"clip_fraction": policy.clipped, "clip_fraction_lower": policy.clipped_lower}
        if reference is not None:
            kl = k3(log_prob, reference)
            per_token = per_token + spec.kl_loss_coef * kl
            shown["kl"] = kl
        loss = token_mean(per_token, piece.weights, total)
        loss.backward()
        with torch.no_grad():
            if is_first:
                shown["mismatch"] = (log_prob - piece.old_log_prob).abs()
                shown["approx_kl"] = k3(piece.old_log_prob, log_prob)
                shown["ppo_kl"] = piece.old_log_prob - log_prob
                shown["entropy"] = _entropy(logits)
            shares = {
                name: token_mean(value.float(), piece.weights, total).item()
                for name, value in shown.items()
            }
            if is_first:
                shares[LARGEST] = _largest_difference(log_prob, piece)
        return shares | {"loss": loss.item()}

    def _reference_log_probs(
        self, pieces: Sequence[MicroBatch], spec: LossSpec
    ) -> Generator[None, None, list[Tensor | None]]:
        if spec.kl_loss_coef == 0:
            return [None] * len(pieces)
        if self._reference is None:
            self._reference = self._load_reference()
        log_probs: list[Tensor | None] = []
        for piece in pieces:
            with torch.no_grad():
                log_probs.append(_chosen(self._logits(self._reference, piece), piece.targets))
            yield
        return log_probs

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


def _largest_difference(log_prob: Tensor, piece: MicroBatch) -> float:
    difference = (log_prob.exp() - piece.old_log_prob.exp()).abs() * piece.mask
    return difference.max().item()


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target: [rows, scored]."""
    return logits.gather(2, targets[:, :, None])[:, :, 0] - logits.logsumexp(-1)


def _entropy(logits: Tensor) -> Tensor:
    """nats, [rows, scored]"""
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)
