"""What waits when another job is started is dropped and counted, and nothing of it comes back."""

from __future__ import annotations

import time

from swarm_server.training.intake_server import IntakeServer, end_request

from fakevllm_server.episodes.job_identity import OTHER_JOB
from fakevllm_server.journal import reads
from fakevllm_server.journal.reads import PlannedBatch
from tests.swarm_server.journal.server_process import JOB


async def start_another_job(server: IntakeServer) -> int:
    intake = server.process.intake
    await server.process.journal.flush()
    num_dropped = intake.drop_waiting(OTHER_JOB)
    await server.process.journal.flush()
    intake.resume(JOB, time.monotonic())
    return num_dropped


async def test_groups_open_groups_and_episodes_of_incomplete_tasks_are_dropped_for_good(
    server: IntakeServer,
) -> None:
    waiting = (await server.play()).uuid
    await server.end(waiting, task="half")
    for name in ("open", "ended", "trained"):
        await server.capture(name)
    await server.end_group("ended")
    assert await start_another_job(server) == 4
    names = {waiting, "open", "ended", "trained"}
    for _ in range(2):
        assert server.reasons == dict.fromkeys(names, OTHER_JOB)
        assert server.groups == dict.fromkeys(names, ("dropped", OTHER_JOB))
        found = server.process.waiting()
        assert (found.groups, found.samples, found.open_groups) == ([], [], {})
        assert set(server.process.intake.pool.waiting.values()) == {0}
        server.restart()
    assert server.process.log.drops == {OTHER_JOB: 4}


async def test_the_proxy_of_a_dropped_open_group_is_told_that_it_was_of_another_job(
    server: IntakeServer,
) -> None:
    await server.capture("open")
    await start_another_job(server)
    await server.capture("open")
    reply = await server.end_group("open")
    assert (reply.success, reply.failure_reason) == (False, OTHER_JOB)


async def test_a_client_of_the_job_before_may_not_agree_to_a_batch_of_another_job(
    server: IntakeServer,
) -> None:
    uuid = (await server.play()).uuid
    await server.end(uuid)
    await start_another_job(server)
    refusal = server.process.intake.pool.clients.agree(end_request(uuid).client_uuid, 0.0)
    assert refusal is not None and "is not in the active list" in refusal


async def test_claims_and_their_calls_are_reopened(server: IntakeServer) -> None:
    episode = await server.play()
    assert await start_another_job(server) == 0
    assert server.process.intake.episodes.find(episode.uuid) is None
    again = await server.claim()
    assert again.uuid == f"{episode.episode_id}0002" and again.calls == []


async def test_a_batch_that_was_planned_and_not_trained_is_dropped(server: IntakeServer) -> None:
    await server.process.boot_trainer()
    await server.capture("planned")
    await server.end_group("planned")
    groups = server.process.intake.pool.take(0).groups
    await server.process.log.record_plan(PlannedBatch(1, 0, groups))
    assert await start_another_job(server) == 1
    assert server.groups == {"planned": ("dropped", OTHER_JOB)}
    assert server.process.journal.read(reads.planned_batches, []) == []
    await server.process.boot_trainer()
    assert not await server.process.step()


async def test_metrics_of_clients_are_not_logged_with_a_step_of_another_job(
    server: IntakeServer,
) -> None:
    server.process.log.record_client_metrics({"tools": 1.0})
    await start_another_job(server)
    await server.process.boot_trainer()
    await server.capture("g")
    await server.end_group("g")
    assert await server.process.step()
    (step,) = [entry for entry in server.process.log.entries_after(0) if entry.kind == "step"]
    assert "train_tools" not in step.metrics
