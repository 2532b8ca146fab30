"""The hook relative_rank: only the order counts, ties share a rank, and the sum is zero."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks import relative_rank

SCORES = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=9)


@given(SCORES)
def test_only_the_order_counts(scores: list[float]) -> None:
    rewards = relative_rank.rank_rewards(scores)
    assert rewards == relative_rank.rank_rewards([score**3 + 2 * score for score in scores])
    for score, reward in zip(scores, rewards, strict=True):
        for other_score, other_reward in zip(scores, rewards, strict=True):
            assert (score < other_score) == (reward < other_reward)
            assert (score == other_score) == (reward == other_reward)


@given(SCORES)
def test_ranks_are_centred_and_between_minus_one_and_one(scores: list[float]) -> None:
    rewards = relative_rank.rank_rewards(scores)
    assert sum(rewards) == pytest.approx(0) and all(-1 <= reward <= 1 for reward in rewards)


def test_scores_within_the_margin_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative_rank, "MARGIN", 0.1)
    assert relative_rank.rank_rewards([0.5, 0.55, 0.9]) == [-0.5, -0.5, 1.0]


def test_a_short_complete_answer_ranks_first_and_a_cut_off_one_last() -> None:
    answers: list[dict[str, Any]] = [
        {"content": "a long answer", "finish_reason": "stop"},
        {"content": "short", "finish_reason": "stop"},
        {"content": "s", "finish_reason": "length"},
    ]
    assert relative_rank.on_compute_relative_reward([], answers, "q") == [0.0, 1.0, -1.0]


def test_tied_answers_get_the_mean_of_their_ranks() -> None:
    rewards = relative_rank.rank_rewards([1.0, 0.0, 0.5, 0.0])
    assert rewards == pytest.approx([1.0, -2 / 3, 1 / 3, -2 / 3])
