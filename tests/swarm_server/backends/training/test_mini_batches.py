"""Properties of the division of a step's batch into mini-batches, on random batches."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fakevllm_server.backends.training.mini_batches import assign_groups, mini_batches
from fakevllm_server.types.backend import Batch, Call
from fakevllm_server.types.demonstrations import Demonstration

SEEDS = range(25)


def random_batch(rng: random.Random) -> Batch:
    """Create calls and demonstrations of up to ten groups, in mixed order. Some calls are empty or
    do not count in the loss."""
    groups = [f"g{number}" for number in range(rng.randrange(11))]
    calls = [
        Call(
            group,
            [1, 2],
            response := [3] * rng.randrange(20),
            [-1.0] * len(response),
            version=0,
            temperature=1.0,
            advantage=1.0,
            weight=rng.choice([0.0, 0.25, 1.0]),
        )
        for group in groups
        for _ in range(rng.randrange(5))
    ]
    demonstrations = [
        Demonstration(group, [1], [2] * rng.randrange(1, 9), "plain")
        for group in groups
        for _ in range(rng.randrange(3))
    ]
    rng.shuffle(calls)
    rng.shuffle(demonstrations)
    return Batch(3, calls, 7, demonstrations)


def groups_of(batch: Batch) -> set[str]:
    return {one.group_id for one in (*batch.calls, *batch.demonstrations)}


def tokens_of(batch: Batch) -> dict[str, int]:
    tokens = Counter[str]()
    for call in batch.calls:
        tokens[call.group_id] += call.num_trained if call.weight > 0 else 0
    for one in batch.demonstrations:
        tokens[one.group_id] += len(one.response_ids)
    return tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_mini_batches_hold_whole_groups_and_each_call_once_in_the_order_of_the_step(
    seed: int,
) -> None:
    rng = random.Random(seed)
    batch, wanted = random_batch(rng), rng.randrange(1, 9)
    parts = [part.batch for part in mini_batches(batch, wanted)]

    of_groups = [group for part in parts for group in groups_of(part)]
    assert len(of_groups) == len(set(of_groups)), "a group is in two mini-batches"
    for name in ("calls", "demonstrations"):
        place = {id(one): at for at, one in enumerate(getattr(batch, name))}
        places = [[place[id(one)] for one in getattr(part, name)] for part in parts]
        assert all(own == sorted(own) for own in places)
        assert sorted(at for own in places for at in own) == list(range(len(place)))
    assert {(part.step, part.version) for part in parts} == {(3, 7)}


@pytest.mark.parametrize("seed", SEEDS)
def test_there_are_as_many_mini_batches_as_wanted_but_none_without_trained_tokens(
    seed: int,
) -> None:
    rng = random.Random(seed)
    batch, wanted = random_batch(rng), rng.randrange(1, 9)
    parts = mini_batches(batch, wanted)

    with_tokens = sum(size > 0 for size in tokens_of(batch).values())
    assert len(parts) == max(min(wanted, with_tokens), 1)
    if len(parts) > 1:
        assert all(sum(tokens_of(part.batch).values()) > 0 for part in parts)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_shares_are_those_of_the_weighted_tokens_and_sum_to_one(seed: int) -> None:
    rng = random.Random(seed)
    batch = random_batch(rng)
    parts = mini_batches(batch, 3)

    assert sum(part.share for part in parts) == pytest.approx(1)
    total = sum(call.weight * call.num_trained for call in batch.calls)
    for part in parts:
        own = sum(call.weight * call.num_trained for call in part.batch.calls)
        assert part.share * total == pytest.approx(own)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_differ_by_at_most_one_group_and_by_no_more_tokens_than_the_groups_of_a_round(
    seed: int,
) -> None:
    """Groups of similar size, which the division deals out in one round, differ little."""
    rng = random.Random(seed)
    sizes = {f"g{at}": rng.randrange(1, 1000) for at in range(rng.randrange(1, 40))}
    num_parts = rng.randrange(1, len(sizes) + 1)
    place = assign_groups(sizes, num_parts)

    assert place.keys() == sizes.keys()
    counts = [0] * num_parts
    tokens = [0] * num_parts
    for group, at in place.items():
        counts[at] += 1
        tokens[at] += sizes[group]
    assert max(counts) - min(counts) <= 1
    in_order = sorted(sizes.values(), reverse=True)
    in_order += [0] * (-len(in_order) % num_parts)
    rounds = [in_order[at : at + num_parts] for at in range(0, len(in_order), num_parts)]
    assert max(tokens) - min(tokens) <= max(one[0] - one[-1] for one in rounds)


def test_equal_batches_are_divided_equally() -> None:
    first, second = (mini_batches(random_batch(random.Random(5)), 3) for _ in range(2))
    assert first == second


def test_one_mini_batch_is_the_batch_itself() -> None:
    batch = random_batch(random.Random(1))
    (part,) = mini_batches(batch, 1)
    assert part.batch is batch and part.share == 1.0
