"""The trained tokens of whole calls, as the flat tensors that the loss functions read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from fakevllm_server.algorithms.loss_sequences import CallShare
from fakevllm_server.backends.torch_losses.demonstration_rows import DemonstrationRows


class TrainedCall(Protocol):
    """The advantage of a call, and the log-probabilities that the rollout engine reported for its
    trained tokens."""

    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def advantage(self) -> float | Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The trained tokens of a micro-batch, one call after another. Each tensor has shape [tokens].

    The calls may be divided into micro-batches in any way that puts each call into exactly one
    micro-batch. The sum of the losses of the micro-batches does not depend on the division.
    """

    sampled_log_prob: Tensor
    """The rollout engine's log-probability of each token, under the distribution from which the
    engine sampled the token."""
    advantages: Tensor
    scale: Tensor
    """Factor of a token's loss; 0 for a token that does not count."""
    token_share: Tensor
    """Weight of a token in means over the step's tokens."""
    units: Tensor
    """Number of each token's unit (a sequence in the loss) within this micro-batch. Units with a
    token that counts in the loss are numbered from 0."""
    has_whole_units: bool
    """Whether all tokens of every unit are in this micro-batch."""
    has_whole_step: bool
    """Whether all tokens of the step that count in the loss are in this micro-batch."""
    old_log_prob: Tensor | None = None
    """The trainer's log-probabilities before the step's first update. If None, the current
    log-probabilities are used, without their gradient."""
    reference_log_prob: Tensor | None = None
    demonstrations: DemonstrationRows | None = None
    """The demonstrations of the micro-batch. Their tokens are trained tokens too, but have the
    scale 0, because they do not count in the policy loss. None if there are no demonstrations."""

    @property
    def counted(self) -> Tensor:
        return self.scale != 0

    def only(self, chosen: Tensor) -> TrainedTokens:
        """Return a copy of these trained tokens with only the tokens at which `chosen` (bool, shape
        [tokens]) is True. The copy has no demonstrations."""
        old, reference = self.old_log_prob, self.reference_log_prob
        return TrainedTokens(
            sampled_log_prob=self.sampled_log_prob[chosen],
            advantages=self.advantages[chosen],
            scale=self.scale[chosen],
            token_share=self.token_share[chosen],
            units=self.units[chosen],
            has_whole_units=self.has_whole_units,
            has_whole_step=self.has_whole_step,
            old_log_prob=None if old is None else old[chosen],
            reference_log_prob=None if reference is None else reference[chosen],
        )

    @staticmethod
    def of(
        calls: Sequence[TrainedCall],
        shares: Sequence[CallShare],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        old_log_prob: Tensor | None = None,
        reference_log_prob: Tensor | None = None,
    ) -> TrainedTokens:
        """Return the trained tokens of `calls` as flat tensors. `shares` has one entry for each
        call. An entry has the call's unit, which is its sequence in the loss. It also has the
        factors by which the call's tokens count in the loss and in the metrics."""
        lengths = [len(call.logprobs) for call in calls]
        counts = torch.tensor(lengths, dtype=torch.long)

        def spread(values: Sequence[float], dtype: torch.dtype = dtype) -> Tensor:
            """Repeat each call's value in `values` once for each trained token of the call. Return
            a tensor of shape [tokens]."""
            return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

        def joined(rows: Sequence[Sequence[float]]) -> Tensor:
            return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype).to(device)

        def advantages() -> Tensor:
            per_call = [call.advantage for call in calls]
            numbers = [value for value in per_call if isinstance(value, int | float)]
            if len(numbers) == len(per_call):
                return spread(numbers)
            return joined([_per_token(*pair) for pair in zip(per_call, lengths, strict=True)])

        return TrainedTokens(
            sampled_log_prob=joined([call.logprobs for call in calls]),
            advantages=advantages(),
            scale=spread([share.scale for share in shares]),
            token_share=spread([share.token_share for share in shares]),
            units=spread(_unit_numbers(shares), torch.long),
            has_whole_units=_has_whole_units(shares, lengths),
            has_whole_step=_has_whole_step(shares, lengths),
            old_log_prob=old_log_prob,
            reference_log_prob=reference_log_prob,
        )


def _per_token(advantage: float | Sequence[float], length: int) -> Sequence[float]:
    if isinstance(advantage, int | float):
        return [advantage] * length
    assert len(advantage) == length, "an advantage for each token"
    return advantage


def _unit_numbers(shares: Sequence[CallShare]) -> list[int]:
    """Return the number of each call's unit within a micro-batch. A unit is one or more calls that
    the loss treats as one sequence.

    Units with a token that counts in the loss are numbered from 0. Each other unit also gets the
    number 0, which has no effect, because its tokens do not contribute to the loss.
    """
    counted = dict.fromkeys(share.unit for share in shares if share.scale)
    numbers = {unit: number for number, unit in enumerate(counted)}
    return [numbers.get(share.unit, 0) for share in shares]


def _has_whole_units(shares: Sequence[CallShare], lengths: Sequence[int]) -> bool:
    num_tokens = Counter[int]()
    for share, length in zip(shares, lengths, strict=True):
        num_tokens[share.unit] += length if share.scale else 0
    return all(num_tokens[share.unit] == share.unit_tokens for share in shares)


def _has_whole_step(shares: Sequence[CallShare], lengths: Sequence[int]) -> bool:
    """Return True if a micro-batch contains all tokens of the step that count in the loss.

    In that case, the `token_share` values of the tokens add up to 1. The result is also True if no
    token of the micro-batch counts, because such a micro-batch adds nothing to the loss.
    """
    parts = [share.token_share * length for share, length in zip(shares, lengths, strict=True)]
    return math.isclose(math.fsum(parts), 1.0, rel_tol=1e-9) or not any(parts)
