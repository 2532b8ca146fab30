"""What makes a step, by each of the protocol's sample-collection methods."""

from __future__ import annotations

import pytest
from swarm_server.pools import episode_of, pool_of

from fakevllm_server.episodes.pool import Pool

EPISODES = "rollout_until_finish_enough_episodes"
TASKS = "rollout_until_finish_enough_tasks"
NON_DUMMY = "rollout_until_finish_enough_non_dummy_tasks"
ANY = "rollout_until_any_client_agree_sync_weight"
ALL = "rollout_until_all_clients_agree_sync_weight"


def pool_by(method: str, batch_size: int = 2, num_repeat: int = 2) -> Pool:
    return pool_of(
        batch_size=batch_size,
        num_repeat=num_repeat,
        swarm_mode_sample_collection_method=method,
    )


def played(pool: Pool, *tasks: str, rewards: tuple[float, ...] = (1.0, 0.0)) -> None:
    for task in tasks:
        for reward in rewards:
            episode_of(pool, task, reward, 0)


def taken(pool: Pool) -> list[tuple[str, int]]:
    pool.complete_all()
    return [(group.task_id, len(group.episodes)) for group in pool.take(version=0).groups]


def test_a_batch_of_whole_tasks_leaves_the_rest() -> None:
    pool = pool_by(TASKS)
    played(pool, "a")
    episode_of(pool, "half", 1.0, 0)
    assert not pool.is_due
    played(pool, "b", "c")
    assert pool.is_due
    assert taken(pool) == [("b", 2), ("c", 2)]
    assert pool.num_finished == 1 and [task for task, _ in pool.partial] == ["half"]


def test_tasks_whose_rewards_are_all_equal_do_not_count_where_the_method_says_so() -> None:
    pool = pool_by(NON_DUMMY)
    played(pool, "tied", "tied too", rewards=(1.0, 1.0))
    played(pool, "a")
    assert not pool.is_due
    played(pool, "b")
    assert taken(pool) == [("a", 2), ("b", 2)]


def test_episodes_however_grouped_are_all_taken_and_a_single_one_compares_with_nothing() -> None:
    pool = pool_by(EPISODES, batch_size=2, num_repeat=3)
    played(pool, "whole", rewards=(1.0, 0.0, 1.0))
    played(pool, "half")
    assert not pool.is_due
    episode_of(pool, "alone", 1.0, 0)
    assert pool.is_due
    pool.complete_all()
    step = pool.take(version=0)
    assert [(group.task_id, len(group.episodes)) for group in step.groups] == [
        ("whole", 3),
        ("half", 2),
    ]
    assert list(step.dropped.values()) == ["fewer_than_two_rewards"]
    assert not pool.is_due and list(pool.partial) == []


@pytest.mark.parametrize(("method", "by_one"), [(ANY, True), (ALL, False)])
def test_clients_that_agree_make_a_step_of_what_there_is(method: str, by_one: bool) -> None:
    pool = pool_by(method, batch_size=100)
    for client in ("me", "you"):
        pool.clients.add(client, 0.0)
    assert not pool.is_due
    played(pool, "a", "b")
    pool.clients.agree("me", 0.0)
    assert pool.is_due is by_one
    pool.clients.agree("you", 0.0)
    assert pool.is_due
    assert taken(pool) == [("a", 2), ("b", 2)]
    played(pool, "c")
    assert not pool.is_due, "the next step is agreed on anew"


@pytest.mark.parametrize("method", [ANY, ALL])
def test_an_agreement_is_acted_on_also_where_nothing_is_left_to_train(method: str) -> None:
    pool = pool_of(swarm_mode_sample_collection_method=method, filter_groups="drop", num_repeat=2)
    played(pool, "tied", rewards=(1.0, 1.0))
    pool.clients.add("me", 0.0)
    pool.clients.agree("me", 0.0)
    assert pool.is_due
    assert taken(pool) == []
    assert not pool.is_due


def test_episodes_of_ties_that_are_dropped_count_to_enough_episodes() -> None:
    pool = pool_of(
        swarm_mode_sample_collection_method=EPISODES,
        filter_groups="drop",
        batch_size=2,
        num_repeat=2,
    )
    played(pool, "tied", rewards=(1.0, 1.0))
    assert not pool.is_due
    played(pool, "a")
    assert pool.is_due
    assert taken(pool) == [("a", 2)]
    assert not pool.is_due
