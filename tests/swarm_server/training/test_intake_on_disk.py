"""Requests are acknowledged only once their changes are on disk, also when the disk fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from swarm_server.samples import call
from swarm_server.training.intake_requests import ABORTS, CALLS, ENDS, Prepare, claims
from swarm_server.training.intake_server import IntakeServer, end_request

from fakevllm_server.episodes import submissions
from fakevllm_server.journal import group_commit_writer
from fakevllm_server.journal.group_commit_writer import JournalError
from fakevllm_server.training import submission_intake
from tests.swarm_server.journal.disk_faults import BlockedWriter, Disk


@pytest.mark.parametrize("prepare", [claims, *ENDS, *ABORTS, *CALLS])
async def test_no_request_is_answered_before_its_change_is_on_disk(
    server: IntakeServer, prepare: Prepare
) -> None:
    request = await prepare(server)
    before = server.process.content()
    blocked = BlockedWriter(server.process.journal)
    answer = asyncio.ensure_future(request())
    await _run_pending_tasks()
    assert not answer.done()
    blocked.release()
    await answer
    assert server.process.content() != before


@pytest.mark.parametrize("prepare", [*ENDS, *ABORTS])
async def test_a_repeated_request_waits_for_the_disk_too(
    server: IntakeServer, prepare: Prepare
) -> None:
    request = await prepare(server)
    blocked = BlockedWriter(server.process.journal)
    first, again = asyncio.ensure_future(request()), asyncio.ensure_future(request())
    await asyncio.sleep(0)
    first.cancel()  # the client has disconnected or timed out
    await _run_pending_tasks()
    assert not again.done()
    blocked.release()
    await again
    written = server.process.content()
    await request()
    assert server.process.content() == written


@pytest.mark.parametrize("prepare", [*ENDS, *ABORTS])
async def test_a_request_that_the_disk_refused_takes_effect_when_it_is_repeated(
    server: IntakeServer, prepare: Prepare
) -> None:
    request = await prepare(server)
    disk = Disk(server.process.journal)
    disk.refuse()
    refused = asyncio.ensure_future(request())
    await _run_pending_tasks()
    assert not refused.done()
    refused.cancel()
    server.kill_and_restart()  # no part of the request was written
    before = server.process.content()
    await request()
    assert server.process.content() != before


async def test_client_metrics_count_once_also_if_the_first_end_was_not_acknowledged(
    server: IntakeServer,
) -> None:
    end = end_request((await server.play()).uuid)
    end.workflow_output.log_metrics = {"tools": 3.0}
    disk = Disk(server.process.journal)
    disk.refuse()
    first = asyncio.ensure_future(server.process.intake.end_episode(end, 1.0, None))
    await _run_pending_tasks()
    first.cancel()  # the server answered 503
    disk.accept()
    for _ in range(2):
        await server.process.intake.end_episode(end, 1.0, None)
    await server.process.log.record_step(1, 1, [], {})
    (step,) = [entry for entry in server.process.log.entries_after(0) if entry.kind == "step"]
    assert step.metrics["train_tools"] == 3.0


async def test_client_metrics_of_an_evaluation_are_not_reported_with_a_step(
    server: IntakeServer,
) -> None:
    end = end_request((await server.play(kind="eval")).uuid)
    end.workflow_output.log_metrics = {"tools": 3.0}
    await server.process.intake.end_episode(end, 1.0, None)
    await server.process.log.record_step(1, 1, [], {})
    (step,) = [entry for entry in server.process.log.entries_after(0) if entry.kind == "step"]
    assert "train_tools" not in step.metrics


async def test_replies_that_wait_for_the_disk_are_remembered_beyond_the_limit(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "MAX_REMEMBERED", 1)
    names = [f"g{number}" for number in range(4)]
    for name in names:
        await server.capture(name)
    blocked = BlockedWriter(server.process.journal)
    first = [asyncio.ensure_future(server.end_group(name)) for name in names]
    await asyncio.sleep(0)
    again = [asyncio.ensure_future(server.end_group(name)) for name in names]
    await _run_pending_tasks()
    blocked.release()
    assert await asyncio.gather(*first) == await asyncio.gather(*again)


async def test_an_app_does_not_wait_for_a_slow_or_failing_disk(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_intake, "CALL_LIMIT_S", 0.01)
    episode = await server.claim()
    blocked = BlockedWriter(server.process.journal)
    await server.capture("g")
    await server.process.intake.add_episode_call(episode, call())
    blocked.release()
    await server.process.journal.flush()
    disk = Disk(server.process.journal)
    disk.refuse()
    await server.capture("g")
    await asyncio.to_thread(_until, lambda: server.process.journal.error is not None)
    monkeypatch.setattr(submission_intake, "CALL_LIMIT_S", 1e6)
    await server.process.intake.add_episode_call(episode, call())
    disk.accept()
    found = server.process.waiting()
    assert {at: len(calls) for at, calls in found.open_groups["g"].items()} == {0: 2, 1: 2}
    assert found.claimed[0].calls == episode.calls == [call(), call()]


@pytest.mark.parametrize("prepare", [claims, *ENDS])
async def test_a_full_journal_refuses_requests_and_accepts_them_later(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch, prepare: Prepare
) -> None:
    request = await prepare(server)
    before = server.process.content()
    monkeypatch.setattr(group_commit_writer, "MAX_WAITING", 0)
    blocked = BlockedWriter(server.process.journal)
    with pytest.raises(JournalError, match="too many changes wait"):
        await request()
    blocked.release()
    assert server.process.content() == before
    await request()
    assert server.process.content() != before


async def test_calls_that_a_full_journal_cannot_accept_are_not_kept_in_memory_either(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await server.play(call(1))
    await server.capture("g", call(1), call(1))
    with monkeypatch.context() as patch:
        patch.setattr(group_commit_writer, "MAX_WAITING", 0)
        blocked = BlockedWriter(server.process.journal)
        await server.process.intake.add_episode_call(episode, call(2))
        await server.capture("g", call(2), call(2))
        blocked.release()
        await server.process.journal.flush()
    await server.process.intake.add_episode_call(episode, call(3))
    await server.capture("g", call(3), call(3))
    found = server.process.waiting()
    assert found.claimed[0].calls == episode.calls == [call(1), call(3)]
    assert found.open_groups["g"][0] == [call(1), call(3)]


async def _run_pending_tasks() -> None:
    """Run the event loop until all tasks have ended that do not wait for the disk."""
    for _ in range(20):
        await asyncio.sleep(0)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)
