import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.fanout import decide


def test_the_best_scored_sibling_is_served() -> None:
    verdict = decide([0, 1, 2], {0: 0.1, 1: 0.9, 2: 0.5}, random.Random(0))
    assert (verdict.served, verdict.best) == (1, 1)


def test_ties_are_broken_at_random_and_not_by_order() -> None:
    chance = random.Random(0)
    winners = Counter(
        decide([0, 1, 2], {0: 1.0, 1: 1.0, 2: 0.0}, chance).served for _ in range(200)
    )
    assert set(winners) == {0, 1}
    assert min(winners.values()) > 60


def test_without_rewards_the_lead_is_served_and_nobody_is_best() -> None:
    assert decide([0, 1], None, random.Random(0)).served == 0
    assert decide([1, 2], {1: None, 2: None}, random.Random(0)).served == 1
    assert decide([1, 2], {1: None, 2: None}, random.Random(0)).best is None


def test_who_cannot_be_shown_is_not_served_but_may_be_the_best() -> None:
    rewards = {0: 0.1, 1: 0.9, 2: 0.5}
    verdict = decide([0, 1, 2], rewards, random.Random(0), showable=[0, 2])
    assert (verdict.served, verdict.best) == (2, 1)
    assert decide([0, 1], None, random.Random(0), showable=[1]).served == 1


def test_where_nobody_can_be_shown_the_best_is_served_all_the_same() -> None:
    verdict = decide([0, 1], {0: 0.1, 1: 0.9}, random.Random(0), showable=[])
    assert (verdict.served, verdict.best) == (1, 1)


def test_where_nobody_answered_nobody_is_served() -> None:
    verdict = decide([], None, random.Random(0))
    assert (verdict.served, verdict.best) == (None, None)


@given(
    st.dictionaries(st.integers(0, 8), st.one_of(st.none(), st.floats(-1, 1)), min_size=1),
    st.integers(),
)
def test_the_served_sibling_has_answered_and_none_beats_it(
    rewards: dict[int, float | None], seed: int
) -> None:
    answered = sorted(rewards)
    verdict = decide(answered, rewards, random.Random(seed))
    assert verdict.served in answered
    if verdict.best is not None:
        best = rewards[verdict.best]
        assert best is not None
        assert all(reward is None or reward <= best for reward in rewards.values())


def test_of_equal_bests_one_that_can_be_shown_is_drawn() -> None:
    for seed in range(20):
        verdict = decide([0, 1, 2], {0: 1.0, 1: 1.0, 2: 0.0}, random.Random(seed), showable=[1, 2])
        assert (verdict.served, verdict.best) == (1, 1)
