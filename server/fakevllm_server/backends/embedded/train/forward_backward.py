"""Run the pieces of a training step through a model, and compute log-probabilities, the loss and
its gradient.

A piece is a set of calls that go through the model together. `Passes.log_probs` and
`Passes.backward` are generators that yield after each pass of a piece. The caller can do other work
in between.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakevllm_server.backends.embedded.train.micro_batches import StepPiece, StepPieces
from fakevllm_server.backends.torch_forest.attention.registry import fastest_attention
from fakevllm_server.backends.torch_forest.edge_log_probs import (
    EdgeValues,
    edge_log_probs,
    edge_values,
)
from fakevllm_server.backends.torch_forest.two_pass_gradient import (
    backward_piece,
    loss_coefficients,
)
from fakevllm_server.backends.torch_losses.kl import k3
from fakevllm_server.backends.torch_losses.mismatch_metrics import Mismatch
from fakevllm_server.backends.torch_losses.step_loss import step_loss, token_means
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens
from fakevllm_server.types.backend import LossSpec, StepMetrics

MAX_LOGITS = 2**26
"""Maximum number of logits held at a time: 256 MB in float32."""
PROB_DIFF_MAX = "prob_diff_max"
"""Metric: the largest difference between the rollout engine's and the trainer's probability of a
token."""


class _PartMetrics(NamedTuple):
    """The part of a training step's metrics that some of the step's pieces contribute. A piece is a
    set of calls that go through the model together."""

    metrics: StepMetrics
    """Contributions of the pieces to the means over the whole step. The metric PROB_DIFF_MAX is not
    a mean but the maximum over the pieces."""
    mismatch: Mismatch | None


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward and backward passes of a training step, through one model and with one attention
    method. The step is cut into pieces (sets of calls that go through the model together)."""

    model: Any
    attention: str
    """Name of the attention method, which is a key of `torch_forest.ATTENTIONS`."""

    def attention_for(self, piece: StepPiece) -> str:
        return fastest_attention(piece.plan, self.attention)

    def _values(self, piece: StepPiece, spec: LossSpec, *, is_first: bool) -> EdgeValues:
        return edge_values(
            self.model,
            piece.plan,
            self.attention_for(piece),
            with_entropy=spec.has_policy_loss and (is_first or spec.entropy_coeff != 0),
            entropy_trains=spec.entropy_coeff != 0,
            max_logits=MAX_LOGITS,
        )

    def log_probs(self, step: StepPieces) -> Generator[None, None, list[Tensor]]:
        """Return the log-probabilities of the trained tokens: one tensor [tokens] for each piece (a
        set of calls that go through the model together). No gradient graph is kept."""
        log_probs: list[Tensor] = []
        for piece in step.pieces:
            with torch.no_grad():
                attention = self.attention_for(piece)
                values = edge_log_probs(self.model, piece.plan, attention, max_logits=MAX_LOGITS)
            log_probs.append(piece.plan.flat(values))
            yield
        return log_probs

    def backward(
        self, step: StepPieces, spec: LossSpec, *, is_first: bool
    ) -> Generator[None, None, StepMetrics]:
        """Add the gradient of the step's loss to the gradients of the model's weights, and return
        the step's metrics. `is_first` is true for the step's first epoch, before any update. In the
        first epoch, the metrics include the differences between the trainer's and the rollout
        engine's log-probabilities."""
        if step.whole is not None:
            return (yield from self._backward_in_two_passes(step, step.whole, spec, is_first))
        parts: list[_PartMetrics] = []
        for piece in step.pieces:
            values = self._values(piece, spec, is_first=is_first)
            loss, metrics = _loss_and_metrics([values], [piece], piece.tokens, spec, is_first)
            if loss.requires_grad:
                loss.backward()
            parts.append(metrics)
            # These tensors hold the piece's graph, which must not stay in memory during the pause.
            del values, loss
            yield
        return _joined(parts)

    def _backward_in_two_passes(
        self, step: StepPieces, whole: TrainedTokens, spec: LossSpec, is_first: bool
    ) -> Generator[None, None, StepMetrics]:
        """Add the gradient of the step's loss to the model's gradients, and return the step's
        metrics. Use this method if the loss of a token depends on tokens of other pieces. A piece
        is a set of calls that go through the model together. The first pass computes the
        log-probabilities of all pieces. The derivatives of the loss follow from these
        log-probabilities. The second pass adds the gradient piece by piece."""
        first_pass: list[EdgeValues] = []
        for piece in step.pieces:
            with torch.no_grad():
                first_pass.append(self._values(piece, spec, is_first=is_first))
            yield
        parts: list[_PartMetrics] = []

        def loss_of(values: Sequence[EdgeValues]) -> Tensor:
            loss, metrics = _loss_and_metrics(values, step.pieces, whole, spec, is_first)
            parts.append(metrics)
            return loss

        _, coefficients = loss_coefficients(loss_of, first_pass)
        if spec.entropy_coeff == 0:
            coefficients = [values._replace(entropy=None) for values in coefficients]
        for piece, coefficient in zip(step.pieces, coefficients, strict=True):
            attention = self.attention_for(piece)
            backward_piece(self.model, piece.plan, attention, coefficient, max_logits=MAX_LOGITS)
            yield
        return _joined(parts)


def _loss_and_metrics(
    values: Sequence[EdgeValues],
    pieces: Sequence[StepPiece],
    tokens: TrainedTokens,
    spec: LossSpec,
    is_first: bool,
) -> tuple[Tensor, _PartMetrics]:
    """Return the loss of some pieces (sets of calls that go through the model together), and what
    these pieces contribute to the step's metrics. `values` has the log-probabilities and entropies
    of each piece. `tokens` has the trained tokens of all these pieces, one piece after another."""
    log_prob = _flat(pieces, [one.log_prob for one in values])
    entropies = [one.entropy for one in values if one.entropy is not None]
    entropy = _flat(pieces, entropies) if entropies else None
    loss, parts = step_loss(log_prob, tokens, spec, entropy if spec.entropy_coeff != 0 else None)
    metrics = {name: value.item() for name, value in parts.items()}
    metrics["loss"] = loss.item()
    if not is_first or entropy is None:
        return loss, _PartMetrics(metrics, None)
    log_prob = log_prob.detach()
    is_equal_version = torch.cat([piece.is_equal_version for piece in pieces])
    return loss, _PartMetrics(
        metrics | _engine_differences(log_prob, entropy.detach(), tokens),
        _mismatch(log_prob, tokens, is_equal_version),
    )


def _flat(pieces: Sequence[StepPiece], edge_values: Sequence[Tensor]) -> Tensor:
    """Convert values per edge (a predicted token that several calls may share) to values per
    trained token. `edge_values` has one tensor for each piece (a set of calls that go through the
    model together). The result has the shape [tokens], with the tokens of all pieces."""
    pairs = zip(pieces, edge_values, strict=True)
    return torch.cat([piece.plan.flat(values) for piece, values in pairs])


def _engine_differences(log_prob: Tensor, entropy: Tensor, tokens: TrainedTokens) -> StepMetrics:
    """Return metrics that compare the trainer's log-probabilities with the rollout engine's, and
    the metric `entropy`.

    `approx_kl`, `ppo_kl` and `entropy` are means over all tokens of the step. Only the contribution
    of `tokens` to each mean is returned. The caller adds up the contributions. `prob_diff_max` is
    the largest difference between trainer and engine in the probability of a token in `tokens`.
    """
    sampled = tokens.sampled_log_prob
    means = {
        "approx_kl": k3(sampled, log_prob),
        "ppo_kl": sampled - log_prob,
        "entropy": entropy,
    }
    difference = (log_prob.exp() - sampled.exp()).abs()[tokens.counted]
    metrics = {name: value.item() for name, value in token_means(means, tokens).items()}
    return metrics | ({PROB_DIFF_MAX: difference.max().item()} if difference.numel() else {})


def _mismatch(log_prob: Tensor, tokens: TrainedTokens, is_equal_version: Tensor) -> Mismatch:
    counted = tokens.counted
    return Mismatch.of(
        log_prob[counted],
        tokens.sampled_log_prob[counted],
        tokens.token_share[counted],
        is_equal_version[counted],
    )


def _joined(parts: Iterable[_PartMetrics]) -> StepMetrics:
    """Combine the metrics of all parts of a step into the metrics of the whole step. The parts'
    contributions to a mean are added up. For PROB_DIFF_MAX, the largest value is taken."""
    columns: dict[str, list[float]] = defaultdict(list)
    mismatches: list[Mismatch] = []
    for metrics, mismatch in parts:
        if mismatch is not None:
            mismatches.append(mismatch)
        for name, value in metrics.items():
            columns[name].append(value)
    joined = {
        name: _largest(values) if name == PROB_DIFF_MAX else sum(values)
        for name, values in columns.items()
    }
    return joined | Mismatch.joined(mismatches).metrics


def _largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if any value is NaN. Python's `max` might ignore a NaN."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)
