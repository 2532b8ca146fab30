"""How far the trainer's log-probabilities are from the engine's, before a step's first update.

With d = trainer - engine of a token the engine sampled, and w = exp(d):

    mismatch        mean |d|
    mismatch_k3     mean w - d - 1, an estimate of KL(engine || trainer)
    mismatch_large  share of tokens with |d| > 0.5
    ess             (Σ w)² / (n Σ w²), the effective sample size as a share of n

All are kept as sums, so they are the same however a step is cut. A token counts by its part in the
step's means (`token_share`); where all parts are equal these are the formulas above.

Numerics and age both move them. So they are taken over the tokens whose calls were sampled wholly
by the weights that are trained now, and `equal_version` says which share of the step that is. Where
it is 0 they are taken over all tokens and hold the drift of older weights too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from fakevllm_server.backends.torch_losses.kl import MAX_LOG_RATIO, k3

LARGE = 0.5


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Over some tokens, each by its share."""

    share: float = 0.0
    absolute: float = 0.0
    k3: float = 0.0
    large: float = 0.0
    weights: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor) -> MismatchSums:
        """[tokens] each."""
        if not len(share):
            return MismatchSums()
        now, then, part = log_prob.double(), sampled.double(), share.double()
        weights = (now - then).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        distance = (now - then).abs()
        columns = (
            torch.ones_like(part),
            distance,
            k3(then, now),
            (distance > LARGE).double(),
            weights,
            weights.square(),
        )
        return MismatchSums(*(torch.stack(columns) @ part).tolist())

    def __add__(self, other: MismatchSums) -> MismatchSums:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return MismatchSums(*(mine + theirs for mine, theirs in pairs))

    @property
    def metrics(self) -> dict[str, float]:
        """Of at least one token."""
        return {
            "mismatch": self.absolute / self.share,
            "mismatch_k3": self.k3 / self.share,
            "mismatch_large": self.large / self.share,
            "ess": self.weights**2 / (self.share * self.squares),
        }


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Of some of a step's tokens; those that do not count must not be among them."""

    every: MismatchSums
    equal: MismatchSums
    """Of those sampled by the weights that are trained."""

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor, is_equal: Tensor) -> Mismatch:
        """[tokens] each."""
        chosen = (log_prob[is_equal], sampled[is_equal], share[is_equal])
        return Mismatch(MismatchSums.of(log_prob, sampled, share), MismatchSums.of(*chosen))

    @staticmethod
    def joined(parts: Iterable[Mismatch]) -> Mismatch:
        parts = list(parts)
        return Mismatch(
            sum((part.every for part in parts), MismatchSums()),
            sum((part.equal for part in parts), MismatchSums()),
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Nothing, of no tokens."""
        if not self.every.share:
            return {}
        told = self.equal if self.equal.share else self.every
        return told.metrics | {"equal_version": self.equal.share / self.every.share}
