"""Reward answers by their rank in the group: 1 for the best, -1 for the worst. Answers with equal
scores share a rank.

Use rewards by rank if the differences between scores mean little, as with a judge's scores. When
the model has nearly solved a task, the scores of its answers are almost equal. If the scores
themselves were the rewards, the updates would then be small. Rewards by rank still differ as much
as at the beginning, so the updates stay large. Therefore use about half of the learning rate that
you would use with the scores themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.hooks.spec import Json, Sibling

MARGIN = 0.0
"""Scores that differ by at most this number count as equal."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    scores = [score(answer) for answer in all_answers]
    for answer, answer_score in zip(all_answers, scores, strict=True):
        answer["score"] = answer_score
    return list(rank_rewards(scores))


def score(answer: Json) -> float:
    """Return the score by which an answer is ranked. A larger score is better. Edit this function
    for your own criterion.

    By default, complete answers rank above incomplete answers, and a shorter complete answer ranks
    above a longer one.
    """
    length = len(answer.get("content") or "")
    return -float(length) if answer["finish_reason"] == "stop" and length else -1e9


def rank_rewards(scores: Sequence[float]) -> list[float]:
    """Return a reward from -1 to 1 for each score, by the score's rank. Scores that count as equal
    share the mean of their ranks, and therefore get the same reward.

    >>> rank_rewards([5.0, 1.0, 2.0, 1.0, 0.0])
    [1.0, -0.25, 0.5, -0.25, -1.0]
    >>> rank_rewards([0.7, 0.7]), rank_rewards([3.0])
    ([0.0, 0.0], [0.0])
    """
    if len(scores) < 2:
        return [0.0] * len(scores)
    rewards = [0.0] * len(scores)
    num_lower = 0
    for tied in tied_groups(scores):
        rank = num_lower + (len(tied) - 1) / 2
        for index in tied:
            rewards[index] = 2 * rank / (len(scores) - 1) - 1
        num_lower += len(tied)
    return rewards


def tied_groups(scores: Sequence[float]) -> list[list[int]]:
    """Return groups of scores that count as equal. Each group is a list of indices into `scores`.
    The group with the lowest scores comes first.

    A score belongs to a group if it exceeds the group's lowest score by at most MARGIN.

    >>> tied_groups([0.5, 0.1, 0.5])
    [[1], [0, 2]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(scores)), key=lambda index: scores[index]):
        if groups and scores[index] - scores[groups[-1][0]] <= MARGIN:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
