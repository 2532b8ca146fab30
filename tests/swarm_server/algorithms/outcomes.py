"""Three groups of outcomes for which the expected advantages are known."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_server.algorithms.advantage_input import Outcome

GROUP_A = [Outcome("a", r, n) for r, n in [(1.0, 2), (0.0, 3), (0.5, 1), (0.0, 4)]]
GROUP_B = [Outcome("b", 1.0, 2), Outcome("b", 1.0, 2)]
LONE = [Outcome("c", 0.7, 3)]
ALL = [*GROUP_A, *GROUP_B, *LONE]


def firsts(advantages: Sequence[Sequence[float]]) -> list[float]:
    """Return the advantage that all tokens of an episode share, for each trained episode."""
    assert all(len(set(tokens)) <= 1 for tokens in advantages)
    return [tokens[0] for tokens in advantages if tokens]


def group(rewards: Sequence[float]) -> list[Outcome]:
    return [Outcome("g", reward, 1) for reward in rewards]
