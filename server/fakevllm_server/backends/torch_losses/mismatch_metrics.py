"""Metrics of the difference between the trainer's and the engine's log-probabilities, before a
step's first update.

For a token that the engine sampled, let d = trainer - engine and w = exp(d):

    mismatch        mean |d|
    mismatch_k3     mean w - d - 1, an estimate of KL(engine || trainer)
    mismatch_large  share of tokens with |d| > 0.5
    ess             (Σ w)² / (n Σ w²), the effective sample size as a share of n

The metrics are computed from sums over all tokens of the step, so they do not depend on the
division into micro-batches. Each token has a weight, its `token_share`, which is its weight in
every mean over the step's tokens. The formulas above are for tokens of equal weight.

Rounding differences, and weights that changed after sampling, both increase the metrics. To measure
only rounding differences, the metrics are taken over the tokens of calls that were sampled wholly
by the current weights. `equal_version` is the share of these tokens in the step. If this share is
0, the metrics are taken over all tokens and include both effects.
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
    """Weighted sums over some tokens, from which the mismatch metrics are computed. The weight of a
    token is its `token_share`, its weight in every mean over the step's tokens."""

    share: float = 0.0
    absolute: float = 0.0
    k3: float = 0.0
    large: float = 0.0
    weights: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor) -> MismatchSums:
        """Return the mismatch sums over the given tokens. Each tensor is [tokens]."""
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
        """The mismatch metrics computed from the sums, by name. There must be at least one
        token."""
        return {
            "mismatch": self.absolute / self.share,
            "mismatch_k3": self.k3 / self.share,
            "mismatch_large": self.large / self.share,
            "ess": self.weights**2 / (self.share * self.squares),
        }


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Mismatch sums over some tokens of a step. `all_tokens` has the sums over all these tokens.
    `equal_version` has the sums over the tokens whose calls were sampled wholly by the current
    weights."""

    all_tokens: MismatchSums
    equal_version: MismatchSums
    """Sums over the tokens whose calls were sampled wholly by the current weights."""

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor, is_equal_version: Tensor) -> Mismatch:
        """Return the mismatch sums over the given tokens. All tokens must have a weight in the
        loss. Each tensor is [tokens]."""
        return Mismatch(
            MismatchSums.of(log_prob, sampled, share),
            MismatchSums.of(
                log_prob[is_equal_version], sampled[is_equal_version], share[is_equal_version]
            ),
        )

    @staticmethod
    def joined(parts: Iterable[Mismatch]) -> Mismatch:
        """Return the mismatch sums of a step, which are the totals of the sums of the step's
        parts."""
        parts = list(parts)
        return Mismatch(
            sum((part.all_tokens for part in parts), MismatchSums()),
            sum((part.equal_version for part in parts), MismatchSums()),
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The mismatch metrics computed from the sums, by name. Without tokens, the dictionary is
        empty."""
        if not self.all_tokens.share:
            return {}
        sums = self.equal_version if self.equal_version.share else self.all_tokens
        return sums.metrics | {"equal_version": self.equal_version.share / self.all_tokens.share}
