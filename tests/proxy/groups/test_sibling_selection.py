import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.groups.sibling_selection import best_sibling, seeded_random, select


def test_the_best_scored_sibling_is_served() -> None:
    selection = select([0, 1, 2], {0: 0.1, 1: 0.9, 2: 0.5}, random.Random(0))
    assert (selection.served, selection.best) == (1, 1)


def test_ties_are_broken_at_random_and_not_by_order() -> None:
    rng = random.Random(0)
    winners = Counter(select([0, 1, 2], {0: 1.0, 1: 1.0, 2: 0.0}, rng).served for _ in range(200))
    assert set(winners) == {0, 1}
    assert min(winners.values()) > 60


def test_the_seed_and_the_question_of_a_request_decide_its_ties() -> None:
    def served(seed: int, question: str) -> int | None:
        rng = seeded_random(seed, question)
        return select(range(4), dict.fromkeys(range(4), 1.0), rng, random_fraction=0.5).served

    for seed in (-5, 0, 42, 2**63 - 1):
        for question in ("", "hi", "half a \ud800 pair"):
            assert served(seed, question) == served(seed, question)
    assert {served(seed, "hi") for seed in range(50)} == {0, 1, 2, 3}
    assert {served(42, str(number)) for number in range(50)} == {0, 1, 2, 3}


def test_without_rewards_the_lead_is_served_and_there_is_no_best_sibling() -> None:
    assert select([0, 1], None, random.Random(0)).served == 0
    assert select([1, 2], {1: None, 2: None}, random.Random(0)).served == 1
    assert select([1, 2], {1: None, 2: None}, random.Random(0)).best is None


def test_an_unservable_sibling_is_not_served_but_may_be_the_best() -> None:
    rewards = {0: 0.1, 1: 0.9, 2: 0.5}
    selection = select([0, 1, 2], rewards, random.Random(0), servable=[0, 2])
    assert (selection.served, selection.best) == (2, 1)
    assert select([0, 1], None, random.Random(0), servable=[1]).served == 1


def test_the_best_sibling_is_served_if_no_sibling_is_servable() -> None:
    selection = select([0, 1], {0: 0.1, 1: 0.9}, random.Random(0), servable=[])
    assert (selection.served, selection.best) == (1, 1)


def test_no_sibling_is_served_without_an_answer() -> None:
    selection = select([], None, random.Random(0))
    assert (selection.served, selection.best) == (None, None)


@given(
    st.dictionaries(st.integers(0, 8), st.one_of(st.none(), st.floats(-1, 1)), min_size=1),
    st.integers(),
)
def test_the_served_sibling_has_answered_and_the_best_has_the_highest_reward(
    rewards: dict[int, float | None], seed: int
) -> None:
    answered = sorted(rewards)
    selection = select(answered, rewards, random.Random(seed))
    assert selection.served in answered
    if selection.best is not None:
        best = rewards[selection.best]
        assert best is not None
        assert all(reward is None or reward <= best for reward in rewards.values())


def test_a_servable_sibling_is_drawn_among_equally_good_ones() -> None:
    for seed in range(20):
        selection = select(
            [0, 1, 2], {0: 1.0, 1: 1.0, 2: 0.0}, random.Random(seed), servable=[1, 2]
        )
        assert (selection.served, selection.best) == (1, 1)


@given(
    st.dictionaries(
        st.integers(0, 5), st.one_of(st.none(), st.sampled_from([0.0, 1.0])), min_size=1
    ),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_the_propensity_of_a_sibling_is_its_frequency_of_being_served(
    rewards: dict[int, float | None], random_fraction: float
) -> None:
    answered, rng = sorted(rewards), random.Random(0)
    selections = [select(answered, rewards, rng, None, random_fraction) for _ in range(400)]
    propensities = {selection.served: selection.propensity for selection in selections}
    counts = Counter(selection.served for selection in selections)
    for served, propensity in propensities.items():
        assert propensity is not None
        assert abs(counts[served] / 400 - propensity) < 0.12
    assert abs(sum(filter(None, propensities.values())) - 1.0) < 1e-9


def test_a_random_choice_draws_any_servable_sibling_regardless_of_reward() -> None:
    rewards = {0: 0.0, 1: 1.0, 2: 0.5}
    selections = [
        select([0, 1, 2], rewards, random.Random(seed), [0, 2], random_fraction=1.0)
        for seed in range(40)
    ]
    assert {selection.served for selection in selections} == {0, 2}
    assert all(selection.is_random and selection.best == 1 for selection in selections)


def test_the_served_sibling_is_the_best_among_equally_good_ones() -> None:
    for seed in range(20):
        assert best_sibling([0, 1, 2], {0: 1.0, 1: 1.0, 2: 1.0}, random.Random(seed), 2) == 2
        assert best_sibling([0, 1, 2], {0: 1.0, 1: 1.0, 2: 0.0}, random.Random(seed), 2) in (0, 1)
