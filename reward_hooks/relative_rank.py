"""Ranks instead of scores: the best answer gets 1, the worst -1, whatever the distance between
them. Equal answers share their places.

For scores whose size means little, such as a judge's. Ranks never shrink while a task is being
solved, so halve the learning rate against scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.hooks.spec import Json, Sibling

MARGIN = 0.0
"""Scores that differ by no more than this are equal."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    scores = [score(answer) for answer in all_answers]
    for answer, points in zip(all_answers, scores, strict=True):
        answer["score"] = points
    return list(rewards_of(scores))


def score(answer: Json) -> float:
    """Yours to write: larger is better. Here: whole answers before cut ones, then short ones."""
    length = len(answer.get("content") or "")
    return -float(length) if answer["finish_reason"] == "stop" and length else -1e9


def rewards_of(scores: Sequence[float]) -> list[float]:
    """From -1 to 1 by rank; those who tie get the mean of their places.

    >>> rewards_of([5.0, 1.0, 2.0, 1.0, 0.0])
    [1.0, -0.25, 0.5, -0.25, -1.0]
    >>> rewards_of([0.7, 0.7]), rewards_of([3.0])
    ([0.0, 0.0], [0.0])
    """
    if len(scores) < 2:
        return [0.0] * len(scores)
    rewards = [0.0] * len(scores)
    for tied in runs(scores):
        below = sum(
            scores[index] < min(scores[one] for one in tied) for index in range(len(scores))
        )
        rank = below + (len(tied) - 1) / 2
        for index in tied:
            rewards[index] = 2 * rank / (len(scores) - 1) - 1
    return rewards


def runs(scores: Sequence[float]) -> list[list[int]]:
    """Indices of equal scores together, by rising score. Within MARGIN of the run's first.

    >>> runs([0.5, 0.1, 0.5])
    [[1], [0, 2]]
    """
    found: list[list[int]] = []
    for index in sorted(range(len(scores)), key=lambda index: scores[index]):
        if found and scores[index] - scores[found[-1][0]] <= MARGIN:
            found[-1].append(index)
        else:
            found.append([index])
    return found
