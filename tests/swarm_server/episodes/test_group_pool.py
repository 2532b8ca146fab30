import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.pools import captured, pool_of
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.episodes import ended_group_ids, finished_groups, open_groups
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.incomplete_tasks import CompletedTask


def test_a_group_with_two_rewards_is_pooled_with_its_calls_in_the_reply() -> None:
    pool = pool_of()
    captured(pool, "g")
    reply = pool.end_group("g", [1.0, 0.0], step=3)
    assert reply.success and reply.pooled and reply.step == 3
    assert [len(calls) for calls in reply.calls] == [1, 1]
    assert pool.num_finished == 1


def test_ending_a_group_again_pools_nothing_more() -> None:
    pool = pool_of()
    captured(pool, "g")
    pool.end_group("g", [1.0, 0.0], step=1)
    assert pool.end_group("g", [0.0, 1.0], step=2).failure_reason == "already_ended"
    assert pool.num_finished == 1


def test_a_late_call_of_an_ended_group_opens_no_group() -> None:
    pool = pool_of()
    captured(pool, "g")
    pool.end_group("g", [1.0, 0.0], step=1)
    captured(pool, "g")
    assert pool.num_open == 0


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([None, 1.0], "fewer_than_two_rewards"), ([None, None], "fewer_than_two_rewards")],
)
def test_a_group_with_fewer_than_two_rewards_is_not_pooled(
    rewards: list[float | None], reason: str
) -> None:
    pool = pool_of()
    captured(pool, "g")
    reply = pool.end_group("g", rewards, step=1)
    assert reply.success and not reply.pooled and reply.failure_reason == reason


def test_a_group_without_a_trainable_call_is_refused_with_the_reason() -> None:
    pool = pool_of()
    for index in range(2):
        pool.add_call(SiblingRef("g", index), call(untrainable="missing_logprob"), now=0.0)
    reply = pool.end_group("g", [1.0, 0.0], step=1)
    assert reply.failure_reason == "no_trainable_call: missing_logprob"


def test_a_group_without_a_greedy_answer_is_not_pooled_if_the_algorithm_needs_one() -> None:
    pool = pool_of(num_repeat=2, algorithm="remax")
    captured(pool, "g")
    reply = pool.end_group("g", [1.0, 0.0], step=1)
    assert (reply.success, reply.pooled, reply.failure_reason) == (True, False, "no_greedy_answer")

    for at in range(2):
        pool.add_episode("sampled", float(at), [call()], f"claim {at}")
    assert list(pool.take_dropped().values()) == ["no_greedy_answer"]

    greedy = replace(call(), temperature=0.0, logprobs=None, untrainable="greedy")
    pool.add_episode("with greedy", 1.0, [greedy], "greedy")
    completed = pool.add_episode("with greedy", 0.0, [call()], "other")
    assert completed is not None and completed.reason is None


def test_after_the_last_step_groups_are_answered_and_not_pooled() -> None:
    pool = pool_of()
    captured(pool, "g")
    reply = pool.end_group("g", [1.0, 0.0], step=9, closed_reason="training_finished")
    assert reply.success and not reply.pooled and reply.failure_reason == "training_finished"
    assert len(reply.calls) == 2 and pool.num_finished == 0


def test_an_unknown_group_and_a_refused_id_fail_with_a_reason() -> None:
    pool = Pool(TrainJob(), {"old": "stale"}.get)
    assert pool.end_group("never seen", [1.0, 0.0], step=1).failure_reason == "unknown_group"
    captured(pool, "old")
    reply = pool.end_group("old", [1.0, 0.0], step=1)
    assert not reply.success and reply.failure_reason == "stale"


def test_an_aborted_group_cannot_be_ended() -> None:
    pool = pool_of()
    captured(pool, "g")
    pool.abort_group("g")
    captured(pool, "g")
    assert pool.end_group("g", [1.0, 0.0], step=1).failure_reason == "aborted"
    assert pool.num_finished == 0


def test_num_repeat_episodes_of_a_task_form_a_group() -> None:
    pool = pool_of(num_repeat=2)
    assert pool.add_episode("t", 1.0, [call(), call()], "one") is None
    assert pool.num_finished == 0
    completed = pool.add_episode("t", 0.0, [call()], "two")
    (group,) = pool.take(version=0).groups
    assert completed == CompletedTask(group, None)
    assert [episode.owner for episode in group.episodes] == ["one", "two"]
    assert [len(episode.calls) for episode in group.episodes] == [2, 1]
    assert group.rewards == [1.0, 0.0]


@pytest.mark.parametrize(("name", "bound"), [("MAX_OPEN_GROUPS", 2), ("MAX_OPEN_TOKENS", 10)])
def test_open_groups_are_limited_and_the_oldest_is_dropped(
    monkeypatch: pytest.MonkeyPatch, name: str, bound: int
) -> None:
    """A call has five tokens."""
    monkeypatch.setattr(open_groups, name, bound)
    pool = pool_of()
    for group in "abc":
        captured(pool, group, siblings=1)
    assert (pool.num_open, pool.waiting["tokens"]) == (2, 10)
    assert pool.take(version=0).dropped == {"a": "pool_full"}
    assert pool.end_group("a", [1.0], step=1).failure_reason == "pool_full"


@pytest.mark.parametrize(("name", "bound"), [("MAX_FINISHED_GROUPS", 2), ("MAX_TOKENS", 20)])
def test_finished_groups_are_limited_and_the_oldest_is_dropped(
    monkeypatch: pytest.MonkeyPatch, name: str, bound: int
) -> None:
    """A group of two calls has ten tokens."""
    monkeypatch.setattr(finished_groups, name, bound)
    pool = pool_of(batch_size=2)
    for group in "abc":
        captured(pool, group)
        pool.end_group(group, [1.0, 0.0], step=1)
    taken = pool.take(version=0)
    assert [group.group_id for group in taken.groups] == ["b", "c"]
    assert taken.dropped == {"a": "pool_full"}


def test_a_full_pool_drops_the_group_with_the_oldest_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finished_groups, "MAX_FINISHED_GROUPS", 2)
    pool = pool_of(batch_size=2)
    for group, version in (("new", 3), ("old", 1), ("newer", 4), ("oldest", 0)):
        captured(pool, group, version=version)
        assert pool.end_group(group, [1.0, 0.0], step=1).pooled
    assert pool.take_dropped() == {"old": "pool_full", "oldest": "pool_full"}
    assert [group.group_id for group in pool.take(version=4).groups] == ["new", "newer"]
    assert pool.waiting["tokens"] == 0


def test_each_completion_of_a_task_forms_a_new_group() -> None:
    pool = pool_of(num_repeat=2)
    for at, reward in enumerate((1.0, 0.0, 1.0, 0.0)):
        pool.add_episode("t", reward, [call()], f"claim {at}")
    assert pool.num_finished == 2


def test_a_call_after_the_end_of_its_episode_is_not_trained() -> None:
    pool = pool_of(num_repeat=2)
    calls = [call()]
    pool.add_episode("t", 1.0, calls, "one")
    calls.append(call())
    pool.add_episode("t", 0.0, [call()], "two")
    (group,) = pool.take(version=0).groups
    assert [len(episode.calls) for episode in group.episodes] == [1, 1]


def test_a_task_without_a_trainable_call_is_dropped_with_the_reason() -> None:
    pool = pool_of(num_repeat=2)
    for at in range(2):
        pool.add_episode("t", float(at), [call(untrainable="temperature 0")], f"claim {at}")
    reason = "no_trainable_call: temperature 0"
    assert pool.take(version=0).dropped == {"task:t#claim 1": reason}


def test_an_open_group_without_a_call_for_an_hour_is_dropped() -> None:
    pool = pool_of()
    captured(pool, "left", now=0.0)
    captured(pool, "busy", now=0.0)
    captured(pool, "busy", now=3000.0)
    pool.sweep(now=3601.0)
    assert pool.num_open == 1
    assert pool.end_group("left", [1.0, 0.0], step=1).failure_reason == "never_ended"
    assert pool.take(version=0).dropped == {"left": "never_ended"}


def test_an_id_that_is_no_longer_in_memory_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_group_ids, "MAX_REMEMBERED", 1)
    pool = Pool(TrainJob(batch_size=1), {"a": "already_trained"}.get)
    for name in "ab":
        captured(pool, name)
        pool.end_group(name, [1.0, 0.0], step=1)
    captured(pool, "a")
    assert pool.num_open == 0
    assert pool.end_group("a", [1.0, 0.0], step=1).failure_reason == "already_trained"


@given(st.lists(st.sampled_from(["call", "end", "abort", "take"]), max_size=40), st.randoms())
def test_no_order_of_events_trains_a_group_twice(events: list[str], chance: random.Random) -> None:
    trained = trained_after(events, chance)
    assert len(trained) == len(set(trained))


def trained_after(events: list[str], chance: random.Random) -> list[str]:
    pool = pool_of()
    trained: list[str] = []
    for event in events:
        name = chance.choice("abc")
        match event:
            case "call":
                captured(pool, name)
            case "end":
                pool.end_group(name, [1.0, 0.0], step=1)
            case "abort":
                pool.abort_group(name)
            case _:
                trained += [group.group_id for group in pool.take(0).groups]
    while pool.is_due:
        trained += [group.group_id for group in pool.take(0).groups]
    return trained
