"""Run the pieces of a training step through a model, and compute log-probabilities, the loss and
its gradient.

A piece is a set of calls that go through the model together. `Passes.log_probs` and
`Passes.backward` are generators that yield after each pass of a piece. The caller can do other work
in between.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

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
from fakevllm_server.backends.torch_losses.measured_loss import (
    MeasuredLoss,
    PartMetrics,
    joined_metrics,
    measured_loss,
    needs_entropy,
)
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens
from fakevllm_server.types.backend import LossSpec, StepMetrics

MAX_LOGITS = 2**26
"""Maximum number of logits held at a time: 256 MB in float32."""


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
            with_entropy=needs_entropy(spec, is_first=is_first),
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

    def measure(
        self, step: StepPieces, spec: LossSpec
    ) -> Generator[None, None, tuple[list[Tensor], list[PartMetrics]]]:
        """Measure a mini-batch before the first update of the training step, without a gradient.
        Return the log-probabilities, as `log_probs` does, and the parts of the metrics."""
        values = yield from self._all_values(step, spec, is_first=True)
        if step.whole is not None:
            parts = [_measured(values, step.pieces, step.whole, spec, True).metrics]
        else:
            parts = [
                _measured([own], [piece], piece.tokens, spec, True).metrics
                for piece, own in zip(step.pieces, values, strict=True)
            ]
        pairs = zip(step.pieces, values, strict=True)
        return [piece.plan.flat(own.log_prob) for piece, own in pairs], parts

    def _all_values(
        self, step: StepPieces, spec: LossSpec, *, is_first: bool
    ) -> Generator[None, None, list[EdgeValues]]:
        """Return the values of all pieces (sets of calls that go through the model together),
        without a gradient."""
        values: list[EdgeValues] = []
        for piece in step.pieces:
            with torch.no_grad():
                values.append(self._values(piece, spec, is_first=is_first))
            yield
        return values

    def backward(
        self, step: StepPieces, spec: LossSpec, *, is_first: bool
    ) -> Generator[None, None, StepMetrics]:
        """Add the gradient of the step's loss to the gradients of the model's weights, and return
        the metrics of an update. `is_first` is true for the step's first update, if it measures
        what is compared before it. Its metrics include the differences between the trainer's and
        the rollout engine's log-probabilities."""
        if step.whole is not None:
            return (yield from self._backward_in_two_passes(step, step.whole, spec, is_first))
        parts: list[PartMetrics] = []
        for piece in step.pieces:
            values = self._values(piece, spec, is_first=is_first)
            loss, metrics = _measured([values], [piece], piece.tokens, spec, is_first)
            if loss.requires_grad:
                loss.backward()
            parts.append(metrics)
            # These tensors hold the piece's graph, which must not stay in memory during the pause.
            del values, loss
            yield
        return joined_metrics(parts)

    def _backward_in_two_passes(
        self, step: StepPieces, whole: TrainedTokens, spec: LossSpec, is_first: bool
    ) -> Generator[None, None, StepMetrics]:
        """Add the gradient of the step's loss to the model's gradients, and return the step's
        metrics. Use this method if the loss of a token depends on tokens of other pieces. A piece
        is a set of calls that go through the model together. The first pass computes the
        log-probabilities of all pieces. The derivatives of the loss follow from these
        log-probabilities. The second pass adds the gradient piece by piece."""
        first_pass = yield from self._all_values(step, spec, is_first=is_first)
        parts: list[PartMetrics] = []

        def loss_of(values: Sequence[EdgeValues]) -> Tensor:
            loss, metrics = _measured(values, step.pieces, whole, spec, is_first)
            parts.append(metrics)
            return loss

        _, coefficients = loss_coefficients(loss_of, first_pass)
        if spec.entropy_coeff == 0:
            coefficients = [values._replace(entropy=None) for values in coefficients]
        for piece, coefficient in zip(step.pieces, coefficients, strict=True):
            attention = self.attention_for(piece)
            backward_piece(self.model, piece.plan, attention, coefficient, max_logits=MAX_LOGITS)
            yield
        return joined_metrics(parts)


def _measured(
    values: Sequence[EdgeValues],
    pieces: Sequence[StepPiece],
    tokens: TrainedTokens,
    spec: LossSpec,
    is_first: bool,
) -> MeasuredLoss:
    """Return the loss of some pieces (sets of calls that go through the model together), and what
    these pieces contribute to the step's metrics. `values` has the log-probabilities and entropies
    of each piece. `tokens` has the trained tokens of all these pieces, one piece after another."""
    entropies = [one.entropy for one in values if one.entropy is not None]
    return measured_loss(
        _flat(pieces, [one.log_prob for one in values]),
        _flat(pieces, entropies) if entropies else None,
        tokens,
        torch.cat([piece.is_equal_version for piece in pieces]),
        spec,
        is_first=is_first,
    )


def _flat(pieces: Sequence[StepPiece], edge_values: Sequence[Tensor]) -> Tensor:
    """Convert values per edge (a predicted token that several calls may share) to values per
    trained token. `edge_values` has one tensor for each piece (a set of calls that go through the
    model together). The result has the shape [tokens], with the tokens of all pieces."""
    pairs = zip(pieces, edge_values, strict=True)
    return torch.cat([piece.plan.flat(values) for piece, values in pairs])
