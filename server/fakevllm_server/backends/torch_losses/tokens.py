"""The trained tokens of some whole calls, flat, as the loss takes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from fakevllm_server.algorithms.loss_units import CallShare


class TrainedCall(Protocol):
    """A call of a batch."""

    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def advantage(self) -> float | Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """[tokens] each, one call after another. The loss is the same however calls are dealt to
    micro-batches, as long as each is there once."""

    sampled_log_prob: Tensor
    """The engine's, under the distribution sampled from."""
    advantages: Tensor
    scale: Tensor
    """What a token's loss is multiplied by; 0 where it does not count."""
    token_share: Tensor
    """Its part in means over the step's tokens."""
    units: Tensor
    """The number of its unit here; from 0 for those that have a counted token."""
    has_whole_units: bool
    """Whether no unit has tokens elsewhere."""
    has_whole_step: bool
    """Whether no token that counts is elsewhere."""
    old_log_prob: Tensor | None = None
    """The trainer's before the step's first update; without it the engine's are taken."""
    reference_log_prob: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        return self.scale != 0

    def only(self, chosen: Tensor) -> TrainedTokens:
        """Those where `chosen`, [tokens] of bool, holds."""
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
        lengths = [len(call.logprobs) for call in calls]
        counts = torch.tensor(lengths, dtype=torch.long)

        def spread(values: Sequence[float], dtype: torch.dtype = dtype) -> Tensor:
            """A number for each call -> the same for each of its tokens."""
            return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

        def joined(rows: Sequence[Sequence[float]]) -> Tensor:
            return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype).to(device)

        def advantages() -> Tensor:
            given = [call.advantage for call in calls]
            numbers = [one for one in given if isinstance(one, int | float)]
            if len(numbers) == len(given):
                return spread(numbers)
            return joined([_of_each(*pair) for pair in zip(given, lengths, strict=True)])

        return TrainedTokens(
            sampled_log_prob=joined([call.logprobs for call in calls]),
            advantages=advantages(),
            scale=spread([share.scale for share in shares]),
            token_share=spread([share.token_share for share in shares]),
            units=spread(_numbered(shares), torch.long),
            has_whole_units=_are_whole(shares, lengths),
            has_whole_step=_is_all(shares, lengths),
            old_log_prob=old_log_prob,
            reference_log_prob=reference_log_prob,
        )


def _of_each(advantage: float | Sequence[float], length: int) -> Sequence[float]:
    if isinstance(advantage, int | float):
        return [advantage] * length
    assert len(advantage) == length, "an advantage for each token"
    return advantage


def _numbered(shares: Sequence[CallShare]) -> list[int]:
    """No number is as large as there are counted tokens, and so none needs room beyond theirs."""
    counted = dict.fromkeys(share.unit for share in shares if share.scale)
    numbers = {unit: number for number, unit in enumerate(counted)}
    return [numbers.get(share.unit, 0) for share in shares]


def _are_whole(shares: Sequence[CallShare], lengths: Sequence[int]) -> bool:
    here = Counter[int]()
    for share, length in zip(shares, lengths, strict=True):
        here[share.unit] += length if share.scale else 0
    return all(here[share.unit] == share.unit_tokens for share in shares)


def _is_all(shares: Sequence[CallShare], lengths: Sequence[int]) -> bool:
    """Where nothing counts, there is nothing elsewhere either, or it does not matter."""
    parts = [share.token_share * length for share, length in zip(shares, lengths, strict=True)]
    return math.isclose(math.fsum(parts), 1.0, rel_tol=1e-9) or not any(parts)
