"""Which sibling the app gets, from what the siblings and the hook said. Pure; chance is passed
in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sibling indices; None where no sibling answered, or none was ranked."""

    served: int | None
    best: int | None


def decide(
    answered: Sequence[int], rewards: Mapping[int, float | None] | None, chance: random.Random
) -> Verdict:
    """The sibling with the highest reward, ties broken at random; without rewards the lead, or who
    comes first.

    >>> decide([0, 1, 2], {0: 0.1, 1: 0.9, 2: None}, random.Random(0))
    Verdict(served=1, best=1)
    >>> decide([1, 2], None, random.Random(0))
    Verdict(served=1, best=None)
    """
    scored = {
        index: reward for index in answered if (reward := (rewards or {}).get(index)) is not None
    }
    if scored:
        top = max(scored.values())
        best = chance.choice([index for index, reward in scored.items() if reward == top])
        return Verdict(served=best, best=best)
    return Verdict(served=min(answered, default=None), best=None)
