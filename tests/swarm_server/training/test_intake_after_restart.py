"""A restarted server continues with the acknowledged and captured work of the process before."""

from __future__ import annotations

import time
from typing import Any

import pytest
from swarm_server.samples import call
from swarm_server.training.intake_server import CLIENT, LIMIT_S, IntakeServer, end_request

from fakevllm_server.journal import group_commit_writer
from tests.swarm_server.journal.server_process import JOB


async def test_a_repeated_end_of_a_trained_group_is_answered_without_its_deleted_calls(
    server: IntakeServer,
) -> None:
    await server.capture("g")
    answer = await server.end_group("g")
    await server.process.boot_trainer()
    assert await server.process.step()
    server.restart(save_freq=1)
    await server.process.boot_trainer()
    await server.capture("h")
    await server.end_group("h")
    while await server.process.step():
        pass
    assert server.groups["g"] == ("consumed", None)
    server.restart()
    again = await server.end_group("g")
    assert again == answer.model_copy(update={"calls": again.calls, "prompts": again.prompts})
    assert again.calls == [[], []]


async def test_an_episode_continues_after_a_restart_with_the_same_key(server: IntakeServer) -> None:
    episode = await server.play(call(1))
    server.kill_and_restart()
    again = server.process.intake.episodes.find_by_key(episode.key)
    assert again is not None and again is server.process.intake.episodes.find_owned(
        episode.uuid, CLIENT
    )
    assert (again.calls, again.idle_limit_s, again.in_flight) == ([call(1)], LIMIT_S, 0)
    await server.process.intake.add_episode_call(again, call(2))
    await server.end(episode.uuid)
    ((_, calls),) = server.process.waiting().samples
    assert calls == [call(1), call(2)]


async def test_the_idle_limit_of_a_claim_restarts_with_the_server(server: IntakeServer) -> None:
    episode = await server.claim(limit_s=10.0)
    server.restart()
    server.process.intake.sweep(time.monotonic() + 9.0)
    assert server.process.intake.episodes.find(episode.uuid) is not None
    server.process.intake.sweep(time.monotonic() + 11.0)
    assert server.process.intake.episodes.find(episode.uuid) is None


async def test_unclaimed_episodes_are_open_after_a_restart(server: IntakeServer) -> None:
    aborted, expired = await server.play(), await server.claim(limit_s=1.0)
    await server.process.intake.abort_episode(aborted.uuid, CLIENT)
    server.process.intake.sweep(time.monotonic() + 10.0)
    server.restart()
    server.process.intake.reopen_episodes()
    again = {(await server.claim()).uuid for _ in range(2)}
    assert again == {f"{one.episode_id}0002" for one in (aborted, expired)}
    assert not any(episode.calls for episode in server.process.waiting().claimed)


async def test_an_open_group_can_be_ended_after_a_restart(server: IntakeServer) -> None:
    await server.capture("g", call(1), call(2))
    server.kill_and_restart()
    await server.capture("g", call(3), call(4), call(5))
    reply = await server.end_group("g", 1.0, 0.0, 0.5)
    assert (reply.success, reply.pooled) == (True, True)
    expected = [[call(1), call(3)], [call(2), call(4)], [call(5)]]
    own = reply.with_prompts_per_call().calls
    assert own == [[one.to_wire() for one in calls] for calls in expected]
    server.restart()
    (group,) = server.process.waiting().groups
    assert [list(one.calls) for one in group.episodes] == expected
    assert group.rewards == [1.0, 0.0, 0.5]


async def test_a_task_can_be_completed_after_a_restart(server: IntakeServer) -> None:
    for reward in (1.0, 0.5):
        await server.end((await server.play(call(int(2 * reward)))).uuid, reward, task="a")
        server.kill_and_restart()
    ((name, found),) = server.groups.items()
    assert name.startswith("task:a#") and found == ("pooled", None)
    (group,) = server.process.waiting().groups
    episodes = [(one.index, one.reward, list(one.calls)) for one in group.episodes]
    assert episodes == [(0, 1.0, [call(2)]), (1, 0.5, [call(1)])]
    assert server.process.intake.pool.num_finished == 1


async def test_the_client_of_a_waiting_episode_may_agree_after_a_restart(
    server: IntakeServer,
) -> None:
    await server.end((await server.play()).uuid)
    await server.process.intake.claim("claims", "train", LIMIT_S)
    evaluates = await server.process.intake.claim("evaluates", "eval", LIMIT_S)
    end = end_request(evaluates.uuid).model_copy(update={"client_uuid": "evaluates"})
    await server.process.intake.end_episode(end, 1.0, None)
    for restart in (server.kill_and_restart, server.restart):
        restart()
        clients = server.process.intake.pool.clients
        assert [clients.agree(one, 0.0) is None for one in (CLIENT, "claims", "evaluates")] == [
            True,
            False,
            False,
        ]


@pytest.mark.parametrize("tasks", [("half", "lacks one too"), ("whole", "whole")])
async def test_the_client_of_whole_or_partial_tasks_may_agree_after_a_restart(
    server: IntakeServer, tasks: tuple[str, str]
) -> None:
    for number, task in enumerate(tasks):
        await server.end((await server.play()).uuid, float(number), task=task)
    server.kill_and_restart()
    assert server.process.intake.pool.clients.agree(CLIENT, 0.0) is None


async def test_waiting_episodes_form_a_group_if_the_new_job_needs_fewer_episodes(
    server: IntakeServer,
) -> None:
    server.restart(num_repeat=4)
    uuids = [(await server.play()).uuid for _ in range(3)]
    for number, uuid in enumerate(uuids):
        await server.end(uuid, float(number))
    assert server.groups == {}
    server.restart(num_repeat=2)
    assert list(server.groups) == [f"task:t#{uuids[1]}"]
    found = server.process.waiting()
    assert [one.owner for one in found.groups[0].episodes] == uuids[:2]
    assert [sample.owner for sample, _ in found.samples] == uuids[2:]
    assert server.process.intake.pool.num_finished == 1
    before = server.process.content()
    server.restart(num_repeat=2)
    assert server.process.content() == before


async def test_groups_that_the_new_job_refuses_are_dropped_with_a_reason(
    server: IntakeServer,
) -> None:
    await server.capture("tied")
    assert (await server.end_group("tied", 0.5, 0.5)).pooled
    await server.capture("tells")
    await server.end_group("tells", 1.0, 0.0)
    for _ in range(2):
        await server.end((await server.play()).uuid, 1.0, task="tied too")
    server.restart(filter_groups="collect")
    reasons = server.reasons
    assert set(reasons.values()) == {"tied"} and "tied" in reasons and len(reasons) == 2
    assert server.groups["tells"] == ("pooled", None)
    assert {found for name, found in server.groups.items() if name != "tells"} == {
        ("dropped", "tied")
    }
    before = server.process.content()
    server.restart()  # this job would accept the groups, but they stay dropped
    assert server.process.content() == before
    assert server.process.intake.pool.num_finished == 1


async def test_waiting_episodes_that_the_new_job_refuses_are_dropped_with_a_reason(
    server: IntakeServer,
) -> None:
    server.restart(num_repeat=4)
    for _ in range(2):
        await server.end((await server.play()).uuid, 1.0)
    server.restart(num_repeat=2, filter_groups="collect")
    assert [found for found in server.groups.values()] == [("dropped", "tied")]
    server.process.record_drops()
    assert list(server.reasons.values()) == ["tied"]
    assert server.process.waiting().samples == []


async def test_an_evaluated_episode_is_stored_and_never_pooled(server: IntakeServer) -> None:
    episode = await server.play(kind="eval")
    await server.end(episode.uuid, 0.25)
    assert server.groups == {episode.uuid: ("eval", None)}
    query = "SELECT reward FROM samples WHERE group_id = ?"
    reward = server.process.journal.read(
        lambda db: db.exec_driver_sql(query, (episode.uuid,)).scalar()
    )
    assert reward == 0.25
    server.restart()
    assert server.process.intake.pool.num_finished == 0
    assert server.reasons == {} and server.process.waiting().samples == []


async def test_after_the_end_of_training_work_is_dropped_with_the_reason(
    server: IntakeServer,
) -> None:
    why = "training_finished"
    episode = await server.play()
    await server.end(episode.uuid, closed=why)
    await server.capture("g")
    reply = await server.end_group("g", closed=why)
    assert (reply.success, reply.pooled, reply.failure_reason) == (True, False, why)
    reply = await server.add_sample("s", closed=why)
    assert (reply.success, reply.pooled, reply.failure_reason) == (True, False, why)
    assert server.groups == {name: ("dropped", why) for name in (episode.uuid, "g", "s")}
    assert server.reasons == {episode.uuid: why}
    server.restart()
    found = server.process.waiting()
    assert (found.groups, found.samples, found.open_groups) == ([], [], {})
    assert server.process.journal.read(_num_calls) == 0


async def test_a_restarted_engine_finds_waiting_work_once(server: IntakeServer) -> None:
    episode = await server.play()
    await server.capture("open")
    await server.capture("ended")
    await server.end_group("ended")
    await server.end((await server.play()).uuid, task="half")
    await server.process.journal.flush()
    before = server.process.content()
    for _ in range(2):
        server.process.intake.resume(JOB, time.monotonic())
    pool = server.process.intake.pool
    assert (pool.num_finished, pool.num_open) == (1, 1)
    assert server.process.intake.episodes.num_claimed == 1
    assert server.process.intake.episodes.find_by_key(episode.key) is not None
    assert server.process.content() == before


async def test_a_group_with_a_call_that_changed_on_disk_is_dropped(server: IntakeServer) -> None:
    for name in ("ended", "open", "whole"):
        await server.capture(name)
    await server.end_group("ended")
    await server.end_group("whole")
    damage = "UPDATE calls SET logprobs = zeroblob(16) WHERE owner IN ('ended/1', 'open/0')"
    await server.process.journal.write(
        group_commit_writer.Change("damage", lambda db: db.exec_driver_sql(damage))
    )
    server.restart()
    assert server.reasons == {"ended": "corrupt", "open": "corrupt"}
    pool = server.process.intake.pool
    assert (pool.num_finished, pool.num_open) == (1, 0)
    assert not (await server.end_group("open")).success
    before = server.process.content()
    server.restart()
    assert server.process.content() == before


def _num_calls(db: Any) -> int:
    return db.exec_driver_sql("SELECT COUNT(*) FROM calls").scalar()
