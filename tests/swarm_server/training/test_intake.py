"""What is handed in: acknowledged once it is on disk, taken once, and there in the next life."""

from __future__ import annotations

import time

import pytest
from swarm_server.samples import call
from swarm_server.training.intake_asks import ABORTS, CALLS, ENDS, Prepare, claims
from swarm_server.training.intakes import CLIENT, LIMIT_S, Lives, end_of

from fakevllm_adapters.protocol.swarm import (
    CapturedCall,
    EngineStatus,
)
from fakevllm_server.episodes.registry import EpisodeRefused
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.types.calls import RecordedCall


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
        with pytest.raises(IdempotencyConflict):
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
        assert lives.now.intake.episodes.find_by_key(episode.key) is None
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
        lives.now.intake.episodes.find_owned(old.uuid, CLIENT)
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
    assert RecordedCall.from_wire(CapturedCall.model_validate(told)) == call()
    for odd in (
        {"weight_versions": [[str(10**20), 0, 2]]},
        {"weight_versions": [[2**31, 0, 2]]},
        {"weight_versions": [[-1, 0, 2]]},
        {"temperature": "nan"},
        {"temperature": "inf"},
    ):
        with pytest.raises(ValueError):
            RecordedCall.from_wire(CapturedCall.model_validate(told | odd))
