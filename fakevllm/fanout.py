"""Which sibling the app gets, from what the siblings and the hook said. Pure; chance is passed
in."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sibling indices; None where no sibling answered, or none was ranked."""

    served: int | None
    best: int | None


def decide(
    answered: Sequence[int],
    rewards: Mapping[int, float | None] | None,
    chance: random.Random,
    showable: Collection[int] | None = None,
) -> Verdict:
    """The sibling with the highest reward, ties broken at random; without rewards the lead, or who
    comes first. `showable`: who can be served, all by default; the best may be none of them.

    >>> decide([0, 1, 2], {0: 0.1, 1: 0.9, 2: None}, random.Random(0))
    Verdict(served=1, best=1)
    >>> decide([1, 2], None, random.Random(0))
    Verdict(served=1, best=None)
    >>> decide([0, 1], {0: 0.1, 1: 0.9}, random.Random(0), showable=[0])
    Verdict(served=0, best=1)
    """
    shown = [index for index in answered if showable is None or index in showable] or answered
    scored = {
        index: reward for index in answered if (reward := (rewards or {}).get(index)) is not None
    }
    best = _top(scored, chance, shown)
    if best in shown:
        return Verdict(served=best, best=best)
    served = _top({index: scored[index] for index in shown if index in scored}, chance, shown)
    return Verdict(served=min(shown, default=None) if served is None else served, best=best)


def _top(
    scored: Mapping[int, float], chance: random.Random, preferred: Collection[int]
) -> int | None:
    top = max(scored.values(), default=None)
    tied = [index for index, reward in scored.items() if reward == top]
    tied = [index for index in tied if index in preferred] or tied
    return chance.choice(tied) if tied else None
