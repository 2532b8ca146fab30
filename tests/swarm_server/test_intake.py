"""What is handed in: acknowledged once it is on disk, taken once, and there in the next life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from swarm_server.intakes import CLIENT, LIMIT_S, Lives, end_of
from swarm_server.samples import call

from fakevllm_adapters.swarm import (
    CapturedCall,
    EngineStatus,
    SiblingRef,
)
from fakevllm_server import intake, submissions
from fakevllm_server.calls import RecordedCall
from fakevllm_server.episodes import EpisodeRefused
from fakevllm_server.journal import writer
from fakevllm_server.journal.writer import JournalTrouble
from fakevllm_server.submissions import OtherBody
from tests.journal.disks import Disk, Held


@pytest.fixture
async def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lives]:
    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    found = Lives(tmp_path / "run")
    yield found
    found.now.close()


Ask = Callable[[], Awaitable[object]]
Prepare = Callable[[Lives], Awaitable[Ask]]
"""What must have happened before, and then what is asked."""


async def claims(lives: Lives) -> Ask:
    return lives.claimed


async def ends_an_episode(lives: Lives) -> Ask:
    uuid = (await lives.played()).uuid
    return lambda: lives.end(uuid)


async def ends_an_eval_episode(lives: Lives) -> Ask:
    uuid = (await lives.played(kind="eval")).uuid
    return lambda: lives.end(uuid)


async def aborts_an_episode(lives: Lives) -> Ask:
    uuid = (await lives.played()).uuid
    return lambda: lives.now.intake.abort_episode(uuid, CLIENT)


async def ends_a_group(lives: Lives) -> Ask:
    await lives.captured("g")
    return lambda: lives.end_group("g")


async def aborts_a_group(lives: Lives) -> Ask:
    await lives.captured("g")
    return lambda: lives.now.intake.abort_group("g")


async def adds_a_sample(lives: Lives) -> Ask:
    return lambda: lives.add_sample("s")


async def ends_a_call_of_a_sibling(lives: Lives) -> Ask:
    return lambda: lives.now.intake.add_call(SiblingRef("g", 0), call())


async def ends_a_call_of_an_episode(lives: Lives) -> Ask:
    episode = await lives.claimed()
    return lambda: lives.now.intake.add_episode_call(episode, call())


ENDS = [ends_an_episode, ends_an_eval_episode, ends_a_group, adds_a_sample]
ABORTS = [aborts_an_episode, aborts_a_group]
CALLS = [ends_a_call_of_a_sibling, ends_a_call_of_an_episode]


# --- on disk before it is acknowledged


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
    await lives.now.journal.settle()
    disk = Disk(lives.now.journal)
    disk.refuse()
    await lives.captured("g")
    await asyncio.to_thread(_until, lambda: lives.now.journal.trouble is not None)
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
    with pytest.raises(JournalTrouble, match="too much waits"):
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
        await lives.now.journal.settle()
    await lives.now.intake.add_episode_call(episode, call(3))
    await lives.captured("g", call(3), call(3))
    found = lives.now.waiting()
    assert found.claimed[0].calls == episode.calls == [call(1), call(3)]
    assert found.open_groups["g"][0] == [call(1), call(3)]


# --- accepted in every state, taken once


@pytest.mark.parametrize("status", list(EngineStatus))
@pytest.mark.parametrize("prepare", [claims, *ENDS, *ABORTS, *CALLS])
async def test_it_is_taken_in_every_state_of_the_engine(
    lives: Lives, prepare: Prepare, status: EngineStatus
) -> None:
    ask = await prepare(lives)
    before = lives.now.content()
    lives.now.engine.status = status
    await ask()
    assert lives.now.content() != before


@pytest.mark.parametrize("prepare", ENDS)
@pytest.mark.parametrize("how", ["at once", "closed", "killed"])
async def test_the_same_again_gets_the_same_words_and_changes_nothing(
    lives: Lives, prepare: Prepare, how: str
) -> None:
    ask = await prepare(lives)
    answer = await ask()
    match how:
        case "closed":
            lives.next()
        case "killed":
            assert lives.now.journal.drain()
            lives.kill()
        case _:
            pass
    before, num_finished = lives.now.content(), lives.now.intake.pool.num_finished
    assert await ask() == answer
    assert lives.now.content() == before
    assert lives.now.intake.pool.num_finished == num_finished


@pytest.mark.parametrize("is_next_life", [False, True])
async def test_other_words_under_the_same_name_are_refused_and_change_nothing(
    lives: Lives, is_next_life: bool
) -> None:
    uuid = (await lives.played()).uuid
    await lives.end(uuid, 1.0)
    await lives.captured("g")
    await lives.end_group("g", 1.0, 0.0)
    await lives.add_sample("s", 0.5)
    if is_next_life:
        lives.next()
    before = lives.now.content()
    for ask in (
        lambda: lives.end(uuid, 0.5),
        lambda: lives.end(uuid, 1.0, task="other"),
        lambda: lives.end_group("g", 1.0, 0.5),
        lambda: lives.add_sample("s", 0.25),
    ):
        with pytest.raises(OtherBody):
            await ask()
    assert lives.now.content() == before


@pytest.mark.parametrize("is_next_life", [False, True])
async def test_late_calls_change_nothing(lives: Lives, is_next_life: bool) -> None:
    ended, aborted = await lives.played(), await lives.played()
    await lives.end(ended.uuid)
    await lives.now.intake.abort_episode(aborted.uuid, CLIENT)
    await lives.captured("ended")
    await lives.end_group("ended")
    await lives.now.intake.abort_group("aborted")
    if is_next_life:
        lives.next()
    before, num_open = lives.now.content(), lives.now.intake.pool.num_open
    for episode in (ended, aborted):
        await lives.now.intake.add_episode_call(episode, call(7))
        assert lives.now.intake.episodes.of_key(episode.key) is None
    for name in ("ended", "aborted"):
        await lives.captured(name, call(7), call(7), call(7))
    assert lives.now.content() == before
    assert lives.now.intake.pool.num_open == num_open


@pytest.mark.parametrize("is_next_life", [False, True])
async def test_an_older_epoch_changes_nothing(lives: Lives, is_next_life: bool) -> None:
    old = await lives.played()
    lives.now.intake.sweep(time.monotonic() + 2 * LIMIT_S)
    new = await lives.claimed()
    assert (new.episode_id, new.epoch) == (old.episode_id, 2)
    assert new.key != old.key and new.uuid != old.uuid
    if is_next_life:
        lives.next()
    before = lives.now.content()
    with pytest.raises(EpisodeRefused, match="is not in claimed status"):
        await lives.end(old.uuid)
    await lives.now.intake.abort_episode(old.uuid, CLIENT)
    await lives.now.intake.add_episode_call(old, call())
    with pytest.raises(EpisodeRefused):
        lives.now.intake.episodes.owned(old.uuid, CLIENT)
    assert lives.now.content() == before
    await lives.end(new.uuid)


async def test_a_foreign_client_ends_and_aborts_nothing(lives: Lives) -> None:
    uuid = (await lives.played()).uuid
    before = lives.now.content()
    foreign = end_of(uuid).model_copy(update={"client_uuid": "somebody else"})
    with pytest.raises(EpisodeRefused, match="claimed by different client"):
        await lives.now.intake.end_episode(foreign, 1.0, None)
    await lives.now.intake.abort_episode(uuid, "somebody else")
    assert lives.now.content() == before


def test_no_call_a_proxy_can_tell_breaks_the_journal() -> None:
    """A number the journal cannot write would end the server."""
    told = call().to_wire().model_dump()
    assert RecordedCall.of_wire(CapturedCall.model_validate(told)) == call()
    for odd in (
        {"weight_versions": [[str(10**20), 0, 2]]},
        {"weight_versions": [[2**31, 0, 2]]},
        {"weight_versions": [[-1, 0, 2]]},
        {"temperature": "nan"},
        {"temperature": "inf"},
    ):
        with pytest.raises(ValueError):
            RecordedCall.of_wire(CapturedCall.model_validate(told | odd))


async def _while_it_could() -> None:
    """Turns of the loop enough for all that needs no disk."""
    for _ in range(20):
        await asyncio.sleep(0)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)
