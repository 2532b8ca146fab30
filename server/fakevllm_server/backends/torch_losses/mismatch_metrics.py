"""Metrics of the difference between the trainer's and the rollout engine's log-probabilities,
before a step's first update.

For each token that the engine sampled, let d = (trainer's log-probability) - (engine's
log-probability) and w = exp(d). n is the number of tokens.

    mismatch        mean of |d|
    mismatch_k3     mean of w - d - 1, an estimate of KL(engine || trainer)
    mismatch_large  share of tokens with |d| > 0.5
    ess             (Σ w)² / (n Σ w²), the effective sample size as a share of n

The formulas are for tokens of equal weight. In general, the weight of a token is its `token_share`,
as in all means over the step's tokens. The metrics are computed from sums over all tokens of the
step. Therefore the metrics do not depend on the division into micro-batches.

Rounding differences increase the metrics, and so do weights that changed after sampling. To measure
only rounding differences, the metrics are computed only from calls that were sampled entirely with
the current weights. `equal_version` is the share of the step's tokens in such calls. If this share
is 0, the metrics are computed from all calls.
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
    """Weighted sums over some tokens. The mismatch metrics, which compare the log-probabilities of
    trainer and rollout engine, are computed from these sums. The weight of a token is its
    `token_share`, as in all means over the step's tokens."""

    share: float = 0.0
    absolute: float = 0.0
    k3: float = 0.0
    large: float = 0.0
    weights: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor) -> MismatchSums:
        """Compute the sums for the mismatch metrics over the given tokens, with each token weighted
        by its `token_share`. The tensors have one value per token: the trainer's log-probability,
        the engine's log-probability, and the `token_share`."""
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

    def scaled(self, factor: float) -> MismatchSums:
        """Return the sums with the `token_share` of each token multiplied by a factor."""
        return MismatchSums(*(factor * value for value in astuple(self)))

    @property
    def metrics(self) -> dict[str, float]:
        """The mismatch metrics (the differences between trainer and rollout engine) by name. The
        sums must include at least one token."""
        return {
            "mismatch": self.absolute / self.share,
            "mismatch_k3": self.k3 / self.share,
            "mismatch_large": self.large / self.share,
            "ess": self.weights**2 / (self.share * self.squares),
        }


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two sets of sums, from which the mismatch metrics are computed. These metrics compare the
    log-probabilities of trainer and rollout engine. One set of sums covers all given tokens. The
    other set covers only the tokens of calls that were sampled entirely with the current
    weights."""

    all_tokens: MismatchSums
    equal_version: MismatchSums
    """Sums over the tokens of calls that were sampled entirely with the current weights."""

    @staticmethod
    def of(log_prob: Tensor, sampled: Tensor, share: Tensor, is_equal_version: Tensor) -> Mismatch:
        """Compute two sets of sums for the mismatch metrics: over all given tokens, and over the
        tokens whose `is_equal_version` is True. Each tensor has one value per token.
        `is_equal_version` is True for tokens of calls that were sampled entirely with the current
        weights. Pass only tokens that count in the loss."""
        return Mismatch(
            MismatchSums.of(log_prob, sampled, share),
            MismatchSums.of(
                log_prob[is_equal_version], sampled[is_equal_version], share[is_equal_version]
            ),
        )

    @staticmethod
    def joined(parts: Iterable[Mismatch]) -> Mismatch:
        """Return the sums for a whole step, added up from the sums for its parts."""
        parts = list(parts)
        return Mismatch(
            sum((part.all_tokens for part in parts), MismatchSums()),
            sum((part.equal_version for part in parts), MismatchSums()),
        )

    def scaled(self, factor: float) -> Mismatch:
        """Return the sums with the `token_share` of each token multiplied by a factor."""
        return Mismatch(self.all_tokens.scaled(factor), self.equal_version.scaled(factor))

    @property
    def metrics(self) -> dict[str, float]:
        """The mismatch metrics (the differences between trainer and rollout engine) by name. If
        there are no tokens, the dictionary is empty."""
        if not self.all_tokens.share:
            return {}
        sums = self.equal_version if self.equal_version.share else self.all_tokens
        return sums.metrics | {"equal_version": self.equal_version.share / self.all_tokens.share}
