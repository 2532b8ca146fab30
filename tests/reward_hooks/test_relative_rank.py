"""relative_rank: only the order counts, ties share, the sum is zero."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_hooks import relative_rank

SCORES = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=9)


@given(SCORES)
def test_only_the_order_counts(scores: list[float]) -> None:
    rewards = relative_rank.rewards_of(scores)
    assert rewards == relative_rank.rewards_of([score**3 + 2 * score for score in scores])
    for one, other in zip(scores, rewards, strict=True):
        for rival, against in zip(scores, rewards, strict=True):
            assert (one < rival) == (other < against) and (one == rival) == (other == against)


@given(SCORES)
def test_ranks_are_centred_and_between_minus_one_and_one(scores: list[float]) -> None:
    rewards = relative_rank.rewards_of(scores)
    assert sum(rewards) == pytest.approx(0) and all(-1 <= reward <= 1 for reward in rewards)


def test_scores_within_the_margin_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative_rank, "MARGIN", 0.1)
    assert relative_rank.rewards_of([0.5, 0.55, 0.9]) == [-0.5, -0.5, 1.0]


def test_a_whole_short_answer_ranks_first_and_a_cut_one_last() -> None:
    answers: list[dict[str, Any]] = [
        {"content": "a long answer", "finish_reason": "stop"},
        {"content": "short", "finish_reason": "stop"},
        {"content": "s", "finish_reason": "length"},
    ]
    assert relative_rank.on_compute_relative_reward([], answers, "q") == [0.0, 1.0, -1.0]


def test_half_a_group_that_ties_shares_its_places() -> None:
    rewards = relative_rank.rewards_of([1.0, 0.0, 0.5, 0.0])
    assert rewards == pytest.approx([1.0, -2 / 3, 1 / 3, -2 / 3])
