"""What is handed in is acknowledged once it is on disk, whatever the disk does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from swarm_server.samples import call
from swarm_server.training.intake_asks import ABORTS, CALLS, ENDS, Prepare, claims
from swarm_server.training.intakes import Lives, end_of

from fakevllm_server.episodes import submissions
from fakevllm_server.journal import writer
from fakevllm_server.journal.writer import JournalError
from fakevllm_server.training import intake
from tests.swarm_server.journal.disks import Disk, Held


@pytest.mark.parametrize("prepare", [claims, *ENDS, *ABORTS, *CALLS])
async def test_nothing_is_answered_before_it_is_on_disk(lives: Lives, prepare: Prepare) -> None:
    ask = await prepare(lives)
    before = lives.now.content()
    held = Held(lives.now.journal)
    answer = asyncio.ensure_future(ask())
    await _while_it_could()
    assert not answer.done()
    held.let_go()
    await answer
    assert lives.now.content() != before


@pytest.mark.parametrize("prepare", [*ENDS, *ABORTS])
async def test_one_who_asks_again_waits_for_the_disk_as_well(
    lives: Lives, prepare: Prepare
) -> None:
    ask = await prepare(lives)
    held = Held(lives.now.journal)
    gone, again = asyncio.ensure_future(ask()), asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    gone.cancel()  # its client has left, or could not wait any longer
    await _while_it_could()
    assert not again.done()
    held.let_go()
    await again
    told = lives.now.content()
    await ask()
    assert lives.now.content() == told


@pytest.mark.parametrize("prepare", [*ENDS, *ABORTS])
async def test_what_a_disk_refuses_is_not_acknowledged_and_has_its_effect_when_it_is_asked_again(
    lives: Lives, prepare: Prepare
) -> None:
    ask = await prepare(lives)
    disk = Disk(lives.now.journal)
    disk.refuse()
    refused = asyncio.ensure_future(ask())
    await _while_it_could()
    assert not refused.done()
    refused.cancel()
    lives.kill()  # nothing of it was ever written
    before = lives.now.content()
    await ask()
    assert lives.now.content() != before


async def test_what_its_client_measured_counts_once_also_where_the_first_end_was_refused(
    lives: Lives,
) -> None:
    end = end_of((await lives.played()).uuid)
    end.workflow_output.log_metrics = {"tools": 3.0}
    disk = Disk(lives.now.journal)
    disk.refuse()
    first = asyncio.ensure_future(lives.now.intake.end_episode(end, 1.0, None))
    await _while_it_could()
    first.cancel()  # the server answered 503
    disk.accept()
    for _ in range(2):
        await lives.now.intake.end_episode(end, 1.0, None)
    await lives.now.log.record_step(1, 1, [], {})
    (step,) = [entry for entry in lives.now.log.entries_after(0) if entry.kind == "step"]
    assert step.metrics["train_tools"] == 3.0


async def test_what_an_evaluation_measured_is_not_told_with_a_step(lives: Lives) -> None:
    end = end_of((await lives.played(kind="eval")).uuid)
    end.workflow_output.log_metrics = {"tools": 3.0}
    await lives.now.intake.end_episode(end, 1.0, None)
    await lives.now.log.record_step(1, 1, [], {})
    (step,) = [entry for entry in lives.now.log.entries_after(0) if entry.kind == "step"]
    assert "train_tools" not in step.metrics


async def test_what_waits_is_remembered_however_much_it_is(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "MAX_REMEMBERED", 1)
    names = [f"g{number}" for number in range(4)]
    for name in names:
        await lives.captured(name)
    held = Held(lives.now.journal)
    first = [asyncio.ensure_future(lives.end_group(name)) for name in names]
    await asyncio.sleep(0)
    again = [asyncio.ensure_future(lives.end_group(name)) for name in names]
    await _while_it_could()
    held.let_go()
    assert await asyncio.gather(*first) == await asyncio.gather(*again)


async def test_an_app_does_not_wait_for_a_disk_that_is_slow_or_in_trouble(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "CALL_LIMIT_S", 0.01)
    episode = await lives.claimed()
    held = Held(lives.now.journal)
    await lives.captured("g")
    await lives.now.intake.add_episode_call(episode, call())
    held.let_go()
    await lives.now.journal.flush()
    disk = Disk(lives.now.journal)
    disk.refuse()
    await lives.captured("g")
    await asyncio.to_thread(_until, lambda: lives.now.journal.error is not None)
    monkeypatch.setattr(intake, "CALL_LIMIT_S", 1e6)
    await lives.now.intake.add_episode_call(episode, call())
    disk.accept()
    found = lives.now.waiting()
    assert {at: len(calls) for at, calls in found.open_groups["g"].items()} == {0: 2, 1: 2}
    assert found.claimed[0].calls == episode.calls == [call(), call()]


@pytest.mark.parametrize("prepare", [claims, *ENDS])
async def test_a_full_journal_refuses_and_takes_it_later(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, prepare: Prepare
) -> None:
    ask = await prepare(lives)
    before = lives.now.content()
    monkeypatch.setattr(writer, "MAX_WAITING", 0)
    held = Held(lives.now.journal)
    with pytest.raises(JournalError, match="too many changes wait"):
        await ask()
    held.let_go()
    assert lives.now.content() == before
    await ask()
    assert lives.now.content() != before


async def test_calls_that_a_full_journal_has_no_room_for_are_left_out_everywhere(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await lives.played(call(1))
    await lives.captured("g", call(1), call(1))
    with monkeypatch.context() as patch:
        patch.setattr(writer, "MAX_WAITING", 0)
        held = Held(lives.now.journal)
        await lives.now.intake.add_episode_call(episode, call(2))
        await lives.captured("g", call(2), call(2))
        held.let_go()
        await lives.now.journal.flush()
    await lives.now.intake.add_episode_call(episode, call(3))
    await lives.captured("g", call(3), call(3))
    found = lives.now.waiting()
    assert found.claimed[0].calls == episode.calls == [call(1), call(3)]
    assert found.open_groups["g"][0] == [call(1), call(3)]


async def _while_it_could() -> None:
    """Turns of the loop enough for all that needs no disk."""
    for _ in range(20):
        await asyncio.sleep(0)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)
