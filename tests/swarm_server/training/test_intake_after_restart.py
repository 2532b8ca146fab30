"""What an earlier life acknowledged or captured, and what this one makes of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from swarm_server.samples import call
from swarm_server.training.intakes import CLIENT, LIMIT_S, Lives, end_of

from fakevllm_server.journal import writer
from tests.swarm_server.journal.lives import JOB


async def test_a_group_that_was_trained_and_let_go_answers_as_before_but_for_its_calls(
    lives: Lives,
) -> None:
    await lives.captured("g")
    answer = await lives.end_group("g")
    await lives.now.boot_trainer()
    assert await lives.now.step()
    lives.next(save_freq=1)
    await lives.now.boot_trainer()
    await lives.captured("h")
    await lives.end_group("h")
    while await lives.now.step():
        pass
    assert lives.groups["g"] == ("consumed", None)
    lives.next()
    again = await lives.end_group("g")
    assert again == answer.model_copy(update={"calls": again.calls})
    assert again.calls == [[], []]


async def test_an_episode_goes_on_in_the_next_life_with_the_same_key(lives: Lives) -> None:
    episode = await lives.played(call(1))
    lives.kill()
    again = lives.now.intake.episodes.find_by_key(episode.key)
    assert again is not None and again is lives.now.intake.episodes.find_owned(episode.uuid, CLIENT)
    assert (again.calls, again.idle_limit_s, again.in_flight) == ([call(1)], LIMIT_S, 0)
    await lives.now.intake.add_episode_call(again, call(2))
    await lives.end(episode.uuid)
    ((_, calls),) = lives.now.waiting().samples
    assert calls == [call(1), call(2)]


async def test_its_client_is_given_its_whole_time_again(lives: Lives) -> None:
    episode = await lives.claimed(limit_s=10.0)
    lives.next()
    lives.now.intake.sweep(time.monotonic() + 9.0)
    assert lives.now.intake.episodes.find(episode.uuid) is not None
    lives.now.intake.sweep(time.monotonic() + 11.0)
    assert lives.now.intake.episodes.find(episode.uuid) is None


async def test_episodes_nobody_holds_are_open_in_the_next_life(lives: Lives) -> None:
    given_up, ran_out = await lives.played(), await lives.claimed(limit_s=1.0)
    await lives.now.intake.abort_episode(given_up.uuid, CLIENT)
    lives.now.intake.sweep(time.monotonic() + 10.0)
    lives.next()
    lives.now.intake.reopen_episodes()
    again = {(await lives.claimed()).uuid for _ in range(2)}
    assert again == {f"{one.episode_id}0002" for one in (given_up, ran_out)}
    assert not any(episode.calls for episode in lives.now.waiting().claimed)


async def test_a_group_that_was_open_is_ended_in_the_next_life(lives: Lives) -> None:
    await lives.captured("g", call(1), call(2))
    lives.kill()
    await lives.captured("g", call(3), call(4), call(5))
    reply = await lives.end_group("g", 1.0, 0.0, 0.5)
    assert (reply.success, reply.pooled) == (True, True)
    spoken = [[call(1), call(3)], [call(2), call(4)], [call(5)]]
    assert reply.calls == [[one.to_wire() for one in calls] for calls in spoken]
    lives.next()
    (group,) = lives.now.waiting().groups
    assert [list(one.calls) for one in group.episodes] == spoken
    assert group.rewards == [1.0, 0.0, 0.5]


async def test_a_task_is_completed_in_the_next_life(lives: Lives) -> None:
    for reward in (1.0, 0.5):
        await lives.end((await lives.played(call(int(2 * reward)))).uuid, reward, task="a")
        lives.kill()
    ((name, found),) = lives.groups.items()
    assert name.startswith("task:a#") and found == ("pooled", None)
    (group,) = lives.now.waiting().groups
    told = [(one.index, one.reward, list(one.calls)) for one in group.episodes]
    assert told == [(0, 1.0, [call(2)]), (1, 0.5, [call(1)])]
    assert lives.now.intake.pool.num_finished == 1


async def test_who_owns_an_episode_that_waits_agrees_in_the_next_life(lives: Lives) -> None:
    await lives.end((await lives.played()).uuid)
    await lives.now.intake.claim("claims", "train", LIMIT_S)
    evaluates = await lives.now.intake.claim("evaluates", "eval", LIMIT_S)
    end = end_of(evaluates.uuid).model_copy(update={"client_uuid": "evaluates"})
    await lives.now.intake.end_episode(end, 1.0, None)
    for restart in (lives.kill, lives.next):
        restart()
        clients = lives.now.intake.pool.clients
        assert [clients.agree(one, 0.0) is None for one in (CLIENT, "claims", "evaluates")] == [
            True,
            False,
            False,
        ]


@pytest.mark.parametrize("tasks", [("half", "lacks one too"), ("whole", "whole")])
async def test_its_episode_may_be_in_a_whole_task_or_in_one_that_lacks_some(
    lives: Lives, tasks: tuple[str, str]
) -> None:
    for number, task in enumerate(tasks):
        await lives.end((await lives.played()).uuid, float(number), task=task)
    lives.kill()
    assert lives.now.intake.pool.clients.agree(CLIENT, 0.0) is None


async def test_episodes_that_wait_are_enough_for_a_job_of_smaller_groups(lives: Lives) -> None:
    lives.next(num_repeat=4)
    uuids = [(await lives.played()).uuid for _ in range(3)]
    for number, uuid in enumerate(uuids):
        await lives.end(uuid, float(number))
    assert lives.groups == {}
    lives.next(num_repeat=2)
    assert list(lives.groups) == [f"task:t#{uuids[1]}"]
    found = lives.now.waiting()
    assert [one.owner for one in found.groups[0].episodes] == uuids[:2]
    assert [sample.owner for sample, _ in found.samples] == uuids[2:]
    assert lives.now.intake.pool.num_finished == 1
    before = lives.now.content()
    lives.next(num_repeat=2)
    assert lives.now.content() == before


async def test_groups_the_next_job_does_not_take_are_dropped_with_a_reason(lives: Lives) -> None:
    await lives.captured("tied")
    assert (await lives.end_group("tied", 0.5, 0.5)).pooled
    await lives.captured("tells")
    await lives.end_group("tells", 1.0, 0.0)
    for _ in range(2):
        await lives.end((await lives.played()).uuid, 1.0, task="tied too")
    lives.next(filter_groups="collect")
    told = lives.reasons
    assert {why for why in told.values()} == {"tied"} and "tied" in told and len(told) == 2
    assert lives.groups["tells"] == ("pooled", None)
    assert {found for name, found in lives.groups.items() if name != "tells"} == {
        ("dropped", "tied")
    }
    before = lives.now.content()
    lives.next()  # would take them: they stay dropped
    assert lives.now.content() == before
    assert lives.now.intake.pool.num_finished == 1


async def test_waiting_episodes_the_next_job_does_not_take_are_dropped_with_a_reason(
    lives: Lives,
) -> None:
    lives.next(num_repeat=4)
    for _ in range(2):
        await lives.end((await lives.played()).uuid, 1.0)
    lives.next(num_repeat=2, filter_groups="collect")
    assert [found for found in lives.groups.values()] == [("dropped", "tied")]
    lives.now.tell_dropped()
    assert list(lives.reasons.values()) == ["tied"]
    assert lives.now.waiting().samples == []


async def test_what_is_evaluated_is_told_and_never_pooled(lives: Lives) -> None:
    episode = await lives.played(kind="eval")
    await lives.end(episode.uuid, 0.25)
    assert lives.groups == {episode.uuid: ("eval", None)}
    query = "SELECT reward FROM samples WHERE group_id = ?"
    reward = lives.now.journal.read(lambda db: db.exec_driver_sql(query, (episode.uuid,)).scalar())
    assert reward == 0.25
    lives.next()
    assert lives.now.intake.pool.num_finished == 0
    assert lives.reasons == {} and lives.now.waiting().samples == []


async def test_after_the_end_of_training_all_is_told_and_nothing_pooled(lives: Lives) -> None:
    why = "training_finished"
    episode = await lives.played()
    await lives.end(episode.uuid, closed=why)
    await lives.captured("g")
    reply = await lives.end_group("g", closed=why)
    assert (reply.success, reply.pooled, reply.failure_reason) == (True, False, why)
    reply = await lives.add_sample("s", closed=why)
    assert (reply.success, reply.pooled, reply.failure_reason) == (True, False, why)
    assert lives.groups == {name: ("dropped", why) for name in (episode.uuid, "g", "s")}
    assert lives.reasons == {episode.uuid: why}
    lives.next()
    found = lives.now.waiting()
    assert (found.groups, found.samples, found.open_groups) == ([], [], {})
    assert lives.now.journal.read(_num_calls) == 0


async def test_an_engine_that_is_started_again_finds_what_waits_once(lives: Lives) -> None:
    episode = await lives.played()
    await lives.captured("open")
    await lives.captured("ended")
    await lives.end_group("ended")
    await lives.end((await lives.played()).uuid, task="half")
    await lives.now.journal.flush()
    before = lives.now.content()
    for _ in range(2):
        lives.now.intake.resume(JOB, time.monotonic())
    pool = lives.now.intake.pool
    assert (pool.num_finished, pool.num_open) == (1, 1)
    assert lives.now.intake.episodes.num_claimed == 1
    assert lives.now.intake.episodes.find_by_key(episode.key) is not None
    assert lives.now.content() == before


async def test_a_group_of_which_a_call_has_changed_on_disk_is_dropped(lives: Lives) -> None:
    for name in ("ended", "open", "whole"):
        await lives.captured(name)
    await lives.end_group("ended")
    await lives.end_group("whole")
    damage = "UPDATE calls SET logprobs = zeroblob(16) WHERE owner IN ('ended/1', 'open/0')"
    await lives.now.journal.write(writer.Change("damage", lambda db: db.exec_driver_sql(damage)))
    lives.next()
    assert lives.reasons == {"ended": "corrupt", "open": "corrupt"}
    pool = lives.now.intake.pool
    assert (pool.num_finished, pool.num_open) == (1, 0)
    assert not (await lives.end_group("open")).success
    before = lives.now.content()
    lives.next()
    assert lives.now.content() == before


def _num_calls(db: Any) -> int:
    return db.exec_driver_sql("SELECT COUNT(*) FROM calls").scalar()
