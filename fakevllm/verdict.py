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
    propensity: float | None = None
    """With which chance this one would have been served, of the same answers with the same
    rewards. What users say of answers can be weighed by its inverse."""
    is_random: bool = False
    """Drawn from all that can be shown, whatever their rewards."""


def decide(
    answered: Sequence[int],
    rewards: Mapping[int, float | None] | None,
    chance: random.Random,
    showable: Collection[int] | None = None,
    random_fraction: float = 0.0,
) -> Verdict:
    """The sibling with the highest reward, ties broken at random; without rewards the lead, or who
    comes first. `showable`: who can be served, all by default; the best may be none of them.
    `random_fraction`: how often any of them is served instead.

    >>> decide([0, 1, 2], {0: 0.1, 1: 0.9, 2: None}, random.Random(0))
    Verdict(served=1, best=1, propensity=1.0, is_random=False)
    >>> decide([1, 2], None, random.Random(0))
    Verdict(served=1, best=None, propensity=1.0, is_random=False)
    >>> decide([0, 1], {0: 0.1, 1: 0.9}, random.Random(0), showable=[0])
    Verdict(served=0, best=1, propensity=1.0, is_random=False)
    """
    shown = [index for index in answered if showable is None or index in showable] or [*answered]
    if not shown:
        return Verdict(None, None)
    scored = _scored(answered, rewards)
    tied = _top({index: scored[index] for index in shown if index in scored}) or [min(shown)]
    is_random = random_fraction > 0 and chance.random() < random_fraction
    served = chance.choice(shown if is_random else tied)
    top_share = 1 / len(tied) if served in tied else 0.0
    propensity = (1 - random_fraction) * top_share + random_fraction / len(shown)
    return Verdict(served, best_of(answered, rewards, chance, served), propensity, is_random)


def best_of(
    answered: Sequence[int],
    rewards: Mapping[int, float | None] | None,
    chance: random.Random,
    served: int | None,
) -> int | None:
    """The one ranked first: of several the served one, else any.

    >>> best_of([0, 1, 2], {0: 1.0, 1: 0.0, 2: 1.0}, random.Random(0), served=2)
    2
    """
    tied = _top(_scored(answered, rewards))
    if not tied:
        return None
    return served if served in tied else chance.choice(tied)


def _scored(
    answered: Sequence[int], rewards: Mapping[int, float | None] | None
) -> dict[int, float]:
    found = rewards or {}
    return {index: reward for index in answered if (reward := found.get(index)) is not None}


def _top(scored: Mapping[int, float]) -> list[int]:
    top = max(scored.values(), default=None)
    return [index for index, reward in scored.items() if reward == top]
