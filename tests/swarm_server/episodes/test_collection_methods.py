"""When a step is due and which groups it takes, for each of the protocol's collection methods."""

from __future__ import annotations

import pytest
from swarm_server.pools import episode_of, pool_of

from fakevllm_server.episodes.group_pool import Pool

EPISODES = "rollout_until_finish_enough_episodes"
TASKS = "rollout_until_finish_enough_tasks"
NON_DUMMY = "rollout_until_finish_enough_non_dummy_tasks"
ANY = "rollout_until_any_client_agree_sync_weight"
ALL = "rollout_until_all_clients_agree_sync_weight"


def pool_with_method(method: str, batch_size: int = 2, num_repeat: int = 2) -> Pool:
    return pool_of(
        batch_size=batch_size,
        num_repeat=num_repeat,
        swarm_mode_sample_collection_method=method,
    )


def add_episodes(pool: Pool, *tasks: str, rewards: tuple[float, ...] = (1.0, 0.0)) -> None:
    for task in tasks:
        for reward in rewards:
            episode_of(pool, task, reward, 0)


def take_groups(pool: Pool) -> list[tuple[str, int]]:
    pool.complete_all()
    return [(group.task_id, len(group.episodes)) for group in pool.take(version=0).groups]


def test_a_step_takes_batch_size_whole_tasks_and_leaves_the_rest() -> None:
    pool = pool_with_method(TASKS)
    add_episodes(pool, "a")
    episode_of(pool, "half", 1.0, 0)
    assert not pool.is_due
    add_episodes(pool, "b", "c")
    assert pool.is_due
    assert take_groups(pool) == [("b", 2), ("c", 2)]
    assert pool.num_finished == 1 and [task for task, _ in pool.partial] == ["half"]


def test_tied_tasks_do_not_count_for_the_non_dummy_method() -> None:
    pool = pool_with_method(NON_DUMMY)
    add_episodes(pool, "tied", "tied too", rewards=(1.0, 1.0))
    add_episodes(pool, "a")
    assert not pool.is_due
    add_episodes(pool, "b")
    assert take_groups(pool) == [("a", 2), ("b", 2)]


def test_a_step_by_episodes_takes_partial_tasks_and_drops_single_episodes() -> None:
    pool = pool_with_method(EPISODES, batch_size=2, num_repeat=3)
    add_episodes(pool, "whole", rewards=(1.0, 0.0, 1.0))
    add_episodes(pool, "half")
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
def test_a_step_takes_all_waiting_tasks_when_clients_agree(method: str, by_one: bool) -> None:
    pool = pool_with_method(method, batch_size=100)
    for client in ("me", "you"):
        pool.clients.add(client, 0.0)
    assert not pool.is_due
    add_episodes(pool, "a", "b")
    pool.clients.agree("me", 0.0)
    assert pool.is_due is by_one
    pool.clients.agree("you", 0.0)
    assert pool.is_due
    assert take_groups(pool) == [("a", 2), ("b", 2)]
    add_episodes(pool, "c")
    assert not pool.is_due, "the next step needs a new agreement"


@pytest.mark.parametrize("method", [ANY, ALL])
def test_an_agreement_makes_a_step_due_even_if_no_group_can_be_trained(method: str) -> None:
    pool = pool_of(swarm_mode_sample_collection_method=method, filter_groups="drop", num_repeat=2)
    add_episodes(pool, "tied", rewards=(1.0, 1.0))
    pool.clients.add("me", 0.0)
    pool.clients.agree("me", 0.0)
    assert pool.is_due
    assert take_groups(pool) == []
    assert not pool.is_due


def test_episodes_of_dropped_ties_count_towards_enough_episodes() -> None:
    pool = pool_of(
        swarm_mode_sample_collection_method=EPISODES,
        filter_groups="drop",
        batch_size=2,
        num_repeat=2,
    )
    add_episodes(pool, "tied", rewards=(1.0, 1.0))
    assert not pool.is_due
    add_episodes(pool, "a")
    assert pool.is_due
    assert take_groups(pool) == [("a", 2)]
    assert not pool.is_due
