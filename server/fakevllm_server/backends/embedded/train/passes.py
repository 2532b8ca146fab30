"""A step's pieces through a model: log-probabilities, the loss, and its gradient.

Each function pauses after every pass of a piece.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakevllm_server.backends.embedded.train.step_pieces import StepPiece, StepPieces
from fakevllm_server.backends.torch_forest.attentions import fastest_attention
from fakevllm_server.backends.torch_forest.forward import EdgeValues, edge_log_probs, edge_values
from fakevllm_server.backends.torch_forest.two_pass import backward_piece, loss_coefficients
from fakevllm_server.backends.torch_losses.kl import k3
from fakevllm_server.backends.torch_losses.mismatch import Mismatch
from fakevllm_server.backends.torch_losses.step_loss import step_loss, token_means
from fakevllm_server.backends.torch_losses.tokens import TrainedTokens
from fakevllm_server.types.backend import LossSpec, StepMetrics

MAX_LOGITS = 2**26
"""Held at a time: 256 MB in float32."""
LARGEST = "prob_diff_max"
"""Of all tokens: how far apart engine and trainer see one probability."""


class _Told(NamedTuple):
    """By some pieces."""

    metrics: StepMetrics
    """Parts of means, and the largest."""
    mismatch: Mismatch | None


@dataclass(frozen=True, slots=True)
class Passes:
    model: Any
    attention: str
    """A name in `torch_forest.ATTENTIONS`."""

    def way(self, piece: StepPiece) -> str:
        return fastest_attention(piece.plan, self.attention)

    def _values(self, piece: StepPiece, spec: LossSpec, *, is_first: bool) -> EdgeValues:
        return edge_values(
            self.model,
            piece.plan,
            self.way(piece),
            with_entropy=is_first or spec.entropy_coeff != 0,
            entropy_trains=spec.entropy_coeff != 0,
            max_logits=MAX_LOGITS,
        )

    def log_probs(self, step: StepPieces) -> Generator[None, None, list[Tensor]]:
        """Of each piece's tokens, without a graph."""
        found: list[Tensor] = []
        for piece in step.pieces:
            with torch.no_grad():
                way = self.way(piece)
                values = edge_log_probs(self.model, piece.plan, way, max_logits=MAX_LOGITS)
            found.append(piece.plan.flat(values))
            yield
        return found

    def backward(
        self, step: StepPieces, spec: LossSpec, *, is_first: bool
    ) -> Generator[None, None, StepMetrics]:
        """Adds the step's gradient to the model's. `is_first`: before any update, when what is
        told of the policy that sampled is true."""
        if step.whole is not None:
            return (yield from self._backward_twice(step, step.whole, spec, is_first=is_first))
        shown: list[_Told] = []
        for piece in step.pieces:
            values = self._values(piece, spec, is_first=is_first)
            loss, told = _scored([values], [piece], piece.tokens, spec, is_first=is_first)
            if loss.requires_grad:
                loss.backward()
            shown.append(told)
            del values, loss  # what they hold is the piece's, not for the pause
            yield
        return _joined(shown)

    def _backward_twice(
        self, step: StepPieces, whole: TrainedTokens, spec: LossSpec, *, is_first: bool
    ) -> Generator[None, None, StepMetrics]:
        """For a loss that couples tokens of different pieces: all values first, then what each
        piece adds to the gradient."""
        first: list[EdgeValues] = []
        for piece in step.pieces:
            with torch.no_grad():
                first.append(self._values(piece, spec, is_first=is_first))
            yield
        shown: list[_Told] = []

        def loss_of(values: Sequence[EdgeValues]) -> Tensor:
            loss, told = _scored(values, step.pieces, whole, spec, is_first=is_first)
            shown.append(told)
            return loss

        _, coefficients = loss_coefficients(loss_of, first)
        if spec.entropy_coeff == 0:
            coefficients = [one._replace(entropy=None) for one in coefficients]
        for piece, coefficient in zip(step.pieces, coefficients, strict=True):
            backward_piece(
                self.model, piece.plan, self.way(piece), coefficient, max_logits=MAX_LOGITS
            )
            yield
        return _joined(shown)


def _scored(
    values: Sequence[EdgeValues],
    pieces: Sequence[StepPiece],
    tokens: TrainedTokens,
    spec: LossSpec,
    *,
    is_first: bool,
) -> tuple[Tensor, _Told]:
    """The loss of some pieces, whose tokens follow one another, and their parts of the metrics."""
    log_prob = _flat(pieces, [one.log_prob for one in values])
    entropies = [one.entropy for one in values if one.entropy is not None]
    entropy = _flat(pieces, entropies) if entropies else None
    loss, parts = step_loss(log_prob, tokens, spec, entropy if spec.entropy_coeff != 0 else None)
    shown = {name: value.item() for name, value in parts.items()}
    shown["loss"] = loss.item()
    if not is_first or entropy is None:
        return loss, _Told(shown, None)
    now = log_prob.detach()
    is_equal = torch.cat([piece.is_equal_version for piece in pieces])
    return loss, _Told(
        shown | _first_look(now, entropy.detach(), tokens), _mismatch(now, tokens, is_equal)
    )


def _flat(pieces: Sequence[StepPiece], of_edges: Sequence[Tensor]) -> Tensor:
    """[edges] of each piece -> [tokens]"""
    pairs = zip(pieces, of_edges, strict=True)
    return torch.cat([piece.plan.flat(found) for piece, found in pairs])


def _first_look(log_prob: Tensor, entropy: Tensor, tokens: TrainedTokens) -> StepMetrics:
    """How trainer and engine differ: these tokens' parts of the means, and the largest."""
    sampled = tokens.sampled_log_prob
    means = {
        "approx_kl": k3(sampled, log_prob),
        "ppo_kl": sampled - log_prob,
        "entropy": entropy,
    }
    difference = (log_prob.exp() - sampled.exp()).abs()[tokens.counted]
    shown = {name: value.item() for name, value in token_means(means, tokens).items()}
    return shown | ({LARGEST: difference.max().item()} if difference.numel() else {})


def _mismatch(log_prob: Tensor, tokens: TrainedTokens, is_equal: Tensor) -> Mismatch:
    own = tokens.counted
    return Mismatch.of(
        log_prob[own], tokens.sampled_log_prob[own], tokens.token_share[own], is_equal[own]
    )


def _joined(shown: Iterable[_Told]) -> StepMetrics:
    """Of all pieces: parts of means add up."""
    found: dict[str, list[float]] = defaultdict(list)
    parts: list[Mismatch] = []
    for metrics, mismatch in shown:
        if mismatch is not None:
            parts.append(mismatch)
        for name, value in metrics.items():
            found[name].append(value)
    joined = {
        name: _largest(values) if name == LARGEST else sum(values) for name, values in found.items()
    }
    return joined | Mismatch.joined(parts).metrics


def _largest(values: Sequence[float]) -> float:
    """What is no number is larger than any: `max` would lose it."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)
