"""The groups that a step takes from the pool: the newest fresh ones, with or without ties."""

from dataclasses import replace
from typing import Any

import pytest
from swarm_server.pools import captured, ended, episode_of, pool_of
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.types.calls import RecordedCall


def test_the_newest_groups_are_taken_in_order_and_the_others_stay() -> None:
    pool = pool_of(batch_size=2)
    for name in "abc":
        captured(pool, name)
        pool.end_group(name, [1.0, 0.0], step=1)
    taken = pool.take(version=0)
    assert [group.group_id for group in taken.groups] == ["b", "c"]
    assert pool.num_finished == 1


def test_with_async_steps_the_oldest_groups_that_can_be_trained_in_time_are_taken() -> None:
    pool = pool_of(batch_size=2, async_steps=1)
    for name, version in zip("abcde", (1, 1, 2, 1, 2), strict=True):
        captured(pool, name, version=version)
        pool.end_group(name, [1.0, 0.0], step=1)
    taken = pool.take(version=2)
    assert [group.group_id for group in taken.groups] == ["b", "d"]
    assert pool.num_finished == 3, "`a` is not among the newest four groups"
    assert [group.group_id for group in pool.take(version=3).groups] == ["a", "c"]


def test_groups_with_stale_weights_are_dropped_with_the_reason() -> None:
    pool = pool_of()
    for name, version in (("old", 0), ("fresh", 3)):
        captured(pool, name, version=version)
        pool.end_group(name, [1.0, 0.0], step=1)
    taken = pool.take(version=5)
    assert [group.group_id for group in taken.groups] == ["fresh"]
    assert taken.dropped == {"old": "stale"}


def test_only_the_stale_calls_of_a_group_are_dropped() -> None:
    pool = pool_of(num_repeat=3)
    for reward, versions in ((0.0, (0, 4, 5)), (1.0, (4, 5)), (2.0, (0, 0))):
        episode_of(pool, "t", reward, *versions)

    taken = pool.take(version=5)

    (group,) = taken.groups
    assert [[call.version for call in episode.calls] for episode in group.episodes] == [
        [4, 5],
        [4, 5],
    ]
    assert (group.rewards, taken.dropped) == ([0.0, 1.0], {})
    assert pool.take_excluded_counts() == {"stale_calls": 3}
    assert pool.take_excluded_counts() == {"stale_calls": 0}


GREEDY = replace(call(), temperature=0.0, logprobs=None, untrainable="greedy")


FRESH, MASKED = call(5), call(5, untrainable="missing_logprob")


@pytest.mark.parametrize(
    ("settings", "old", "fresh"),
    [
        ({}, call(), [(1.0, FRESH)]),
        ({}, call(), [(0.0, MASKED), (1.0, MASKED)]),
        ({"algorithm": "remax"}, GREEDY, [(0.0, FRESH), (1.0, FRESH)]),
        ({"filter_groups": True}, call(), [(1.0, FRESH), (1.0, FRESH)]),
    ],
)
def test_a_group_with_too_few_fresh_calls_is_dropped_as_stale(
    settings: dict[str, Any], old: RecordedCall, fresh: list[tuple[float, RecordedCall]]
) -> None:
    """The fresh calls have one reward, no trainable call, no greedy answer, or only ties."""
    pool = pool_of(num_repeat=1 + len(fresh), **settings)
    for at, (reward, one) in enumerate([(0.5, old), *fresh]):
        pool.add_episode("t", reward, [one], str(at))
    assert pool.is_due

    taken = pool.take(version=5)

    assert (taken.groups, taken.dropped) == ([], {f"task:t#{len(fresh)}": "stale"})
    assert pool.take_excluded_counts() == {"stale_calls": 1}


def test_the_rest_of_a_batch_waits_after_stale_groups_are_dropped() -> None:
    pool = pool_of(batch_size=2)
    for name, version in (("old", 0), ("fresh", 5)):
        captured(pool, name, version=version)
        pool.end_group(name, [1.0, 0.0], step=1)
    assert pool.is_due
    taken = pool.take(version=5)
    assert (taken.groups, taken.dropped) == ([], {"old": "stale"})
    assert not pool.is_due and pool.num_finished == 1


def test_a_tied_group_counts_unless_groups_are_filtered() -> None:
    plain, filtering = pool_of(), pool_of(filter_groups=True)
    assert (ended(plain, "g", 1.0, 1.0), plain.is_due) == ("", True)
    assert (ended(filtering, "g", 1.0, 1.0), filtering.is_due) == ("tied", False)
    assert filtering.take_excluded_counts() == {"stale_calls": 0, "tied_groups": 1}


@pytest.mark.parametrize(("settings", "num_seen"), [({}, 4), ({"max_num_gen_batches": 1}, 2)])
def test_collect_waits_for_groups_with_signal_and_drop_does_not(
    settings: dict[str, Any], num_seen: int
) -> None:
    collecting = pool_of(
        batch_size=2, filter_groups="collect", **{"max_num_gen_batches": 2} | settings
    )
    dropping = pool_of(batch_size=2, filter_groups="drop")
    keeping = pool_of(batch_size=2)
    for pool, is_due_at in ((collecting, num_seen), (dropping, 2), (keeping, 2)):
        ended(pool, "signal", 1.0, 0.0)
        num = 1
        while not pool.is_due:
            ended(pool, f"tied {num}", 1.0, 1.0)
            num += 1
        assert num == is_due_at
    assert [len(pool.take(version=0).groups) for pool in (dropping, keeping)] == [1, 2]


def test_a_dropped_tie_counts_towards_the_next_step() -> None:
    pool = pool_of(batch_size=2, filter_groups="drop")
    ended(pool, "a", 1.0, 0.0)
    ended(pool, "b", 1.0, 0.0)
    pool.take(version=0)
    ended(pool, "tied meanwhile", 1.0, 1.0)
    pool.take_excluded_counts()  # the step has read the counts
    ended(pool, "c", 1.0, 0.0)
    assert pool.is_due


def test_filter_groups_accepts_booleans_as_verl_does() -> None:
    job = TrainJob.model_validate
    read = [job({"filter_groups": value}).filter_groups for value in (False, True, "drop")]
    assert read == ["keep", "collect", "drop"]
    assert TrainJob.from_yaml(job({"filter_groups": True}).as_yaml()).filter_groups == "collect"
    with pytest.raises(ValueError, match="filter_groups"):
        job({"filter_groups": "some"})


def test_a_tied_task_is_dropped_if_groups_are_filtered() -> None:
    pool = pool_of(num_repeat=2, filter_groups=True)
    for _ in range(2):
        episode_of(pool, "t", 1.0, 0)
    assert list(pool.take_dropped().values()) == ["tied"]


def test_ties_are_decided_after_overlong_penalties() -> None:
    pool = pool_of(filter_groups=True, max_response_length=4, overlong_buffer_len=2)
    pool.add_call(SiblingRef("g", 0), call(ids=(5, 6)), now=0.0)
    pool.add_call(SiblingRef("g", 1), call(ids=(5, 6, 7)), now=0.0)
    assert pool.end_group("g", [1.0, 1.0], step=1).pooled
    pool.add_call(SiblingRef("h", 0), call(ids=(5, 6)), now=0.0)
    pool.add_call(SiblingRef("h", 1), call(ids=(5, 6, 7)), now=0.0)
    assert pool.end_group("h", [0.5, 1.0], step=1).failure_reason == "tied"


def test_ties_do_not_delay_a_step_forever() -> None:
    pool = pool_of(batch_size=2, filter_groups=True, max_num_gen_batches=2)
    for name in "abcd":
        assert ended(pool, name, 0.0, 0.0) == "tied"
    assert not pool.is_due, "no group can be trained"
    assert ended(pool, "e", 1.0, 0.0) == ""
    assert [group.group_id for group in pool.take(version=0).groups] == ["e"]
    pool.take_excluded_counts()
    assert ended(pool, "f", 1.0, 0.0) == "" and not pool.is_due, "the count was reset"
