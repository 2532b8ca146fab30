"""Metrics of the difference between the trainer's and the engine's log-probabilities, before a
step's first update.

For a token that the engine sampled, let d = trainer - engine and w = exp(d):

    mismatch        mean |d|
    mismatch_k3     mean w - d - 1, an estimate of KL(engine || trainer)
    mismatch_large  share of tokens with |d| > 0.5
    ess             (Σ w)² / (n Σ w²), the effective sample size as a share of n

All are kept as sums, so they do not depend on how a step is cut. A token's weight is its part in
the step's means (`token_share`); if all parts are equal, these are the formulas above.

Both numerics and the age of a sample increase the metrics. They are therefore taken over the tokens
whose calls were sampled wholly by the current weights, and `equal_version` is the share of these
tokens in the step. If that share is 0, the metrics are taken over all tokens, and include the drift
of older weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from fakevllm_server.backends.torch_losses.kl import MAX_LOG_RATIO, k3

LARGE = 0.5
"""Absolute difference in nats above which a token counts in `mismatch_large`."""


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Sums over some tokens, each weighted by its share."""

    share: float = 0.0
    absolute: float = 0.0
    k3: float = 0.0
    large: float = 0.0
    weights: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor) -> MismatchSums:
        """Compute the sums over the given tokens. Each tensor is [tokens]."""
        if not len(share):
            return MismatchSums()
        trainer, engine, share = log_prob.double(), sampled.double(), share.double()
        weights = (trainer - engine).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        distance = (trainer - engine).abs()
        columns = (
            torch.ones_like(share),
            distance,
            k3(engine, trainer),
            (distance > LARGE).double(),
            weights,
            weights.square(),
        )
        return MismatchSums(*(torch.stack(columns) @ share).tolist())

    def __add__(self, other: MismatchSums) -> MismatchSums:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return MismatchSums(*(mine + theirs for mine, theirs in pairs))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the sums, by name. There must be at least one token."""
        return {
            "mismatch": self.absolute / self.share,
            "mismatch_k3": self.k3 / self.share,
            "mismatch_large": self.large / self.share,
            "ess": self.weights**2 / (self.share * self.squares),
        }


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Mismatch sums of some of a step's counted tokens."""

    all_tokens: MismatchSums
    equal_version: MismatchSums
    """Sums of the tokens that the current weights sampled."""

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor, is_equal_version: Tensor) -> Mismatch:
        """Compute the sums over the given tokens, all of which must be counted tokens. Each tensor
        is [tokens]."""
        return Mismatch(
            MismatchSums.of(log_prob, sampled, share),
            MismatchSums.of(
                log_prob[is_equal_version], sampled[is_equal_version], share[is_equal_version]
            ),
        )

    @staticmethod
    def joined(parts: Iterable[Mismatch]) -> Mismatch:
        """Add up the sums of the parts of a step."""
        parts = list(parts)
        return Mismatch(
            sum((part.all_tokens for part in parts), MismatchSums()),
            sum((part.equal_version for part in parts), MismatchSums()),
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the sums, by name; an empty dictionary if there are no tokens."""
        if not self.all_tokens.share:
            return {}
        sums = self.equal_version if self.equal_version.share else self.all_tokens
        return sums.metrics | {"equal_version": self.equal_version.share / self.all_tokens.share}
