"""Requests take effect once, and their effects survive a restart of the server."""

from __future__ import annotations

import time

import pytest
from swarm_server.samples import call
from swarm_server.training.intake_requests import ABORTS, CALLS, ENDS, Prepare, claims
from swarm_server.training.intake_server import CLIENT, LIMIT_S, IntakeServer, end_request

from fakevllm_adapters.protocol.swarm import (
    CapturedCall,
    EngineStatus,
)
from fakevllm_server.episodes.episode_registry import EpisodeRefused
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.types.calls import RecordedCall


@pytest.mark.parametrize("status", list(EngineStatus))
@pytest.mark.parametrize("prepare", [claims, *ENDS, *ABORTS, *CALLS])
async def test_requests_are_accepted_in_every_state_of_the_engine(
    server: IntakeServer, prepare: Prepare, status: EngineStatus
) -> None:
    request = await prepare(server)
    before = server.process.content()
    server.process.engine.status = status
    await request()
    assert server.process.content() != before


@pytest.mark.parametrize("prepare", ENDS)
@pytest.mark.parametrize("how", ["at once", "closed", "killed"])
async def test_a_repeated_request_gets_the_same_reply_and_changes_nothing(
    server: IntakeServer, prepare: Prepare, how: str
) -> None:
    request = await prepare(server)
    answer = await request()
    match how:
        case "closed":
            server.restart()
        case "killed":
            assert server.process.journal.drain()
            server.kill_and_restart()
        case _:
            pass
    before, num_finished = server.process.content(), server.process.intake.pool.num_finished
    assert await request() == answer
    assert server.process.content() == before
    assert server.process.intake.pool.num_finished == num_finished


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_another_body_with_the_same_key_is_refused_and_changes_nothing(
    server: IntakeServer, is_restarted: bool
) -> None:
    uuid = (await server.play()).uuid
    await server.end(uuid, 1.0)
    await server.capture("g")
    await server.end_group("g", 1.0, 0.0)
    await server.add_sample("s", 0.5)
    await server.add_demonstration("edit:g/f")
    if is_restarted:
        server.restart()
    before = server.process.content()
    for request in (
        lambda: server.end(uuid, 0.5),
        lambda: server.end(uuid, 1.0, task="other"),
        lambda: server.end_group("g", 1.0, 0.5),
        lambda: server.add_sample("s", 0.25),
        lambda: server.add_demonstration("edit:g/f", (9,)),
    ):
        with pytest.raises(IdempotencyConflict):
            await request()
    assert server.process.content() == before


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_late_calls_change_nothing(server: IntakeServer, is_restarted: bool) -> None:
    ended, aborted = await server.play(), await server.play()
    await server.end(ended.uuid)
    await server.process.intake.abort_episode(aborted.uuid, CLIENT)
    await server.capture("ended")
    await server.end_group("ended")
    await server.process.intake.abort_group("aborted")
    if is_restarted:
        server.restart()
    before, num_open = server.process.content(), server.process.intake.pool.num_open
    for episode in (ended, aborted):
        await server.process.intake.add_episode_call(episode, call(7))
        assert server.process.intake.episodes.find_by_key(episode.key) is None
    for name in ("ended", "aborted"):
        await server.capture(name, call(7), call(7), call(7))
    assert server.process.content() == before
    assert server.process.intake.pool.num_open == num_open


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_requests_for_an_older_claim_change_nothing(
    server: IntakeServer, is_restarted: bool
) -> None:
    old = await server.play()
    server.process.intake.sweep(time.monotonic() + 2 * LIMIT_S)
    new = await server.claim()
    assert (new.episode_id, new.epoch) == (old.episode_id, 2)
    assert new.key != old.key and new.uuid != old.uuid
    if is_restarted:
        server.restart()
    before = server.process.content()
    with pytest.raises(EpisodeRefused, match="is not in claimed status"):
        await server.end(old.uuid)
    await server.process.intake.abort_episode(old.uuid, CLIENT)
    await server.process.intake.add_episode_call(old, call())
    with pytest.raises(EpisodeRefused):
        server.process.intake.episodes.find_owned(old.uuid, CLIENT)
    assert server.process.content() == before
    await server.end(new.uuid)


async def test_another_client_can_neither_end_nor_abort_an_episode(server: IntakeServer) -> None:
    uuid = (await server.play()).uuid
    before = server.process.content()
    foreign = end_request(uuid).model_copy(update={"client_uuid": "somebody else"})
    with pytest.raises(EpisodeRefused, match="claimed by different client"):
        await server.process.intake.end_episode(foreign, 1.0, None)
    await server.process.intake.abort_episode(uuid, "somebody else")
    assert server.process.content() == before


def test_calls_that_the_journal_cannot_store_are_refused() -> None:
    """A number that the journal cannot write would end the server."""
    wire = call().to_wire().model_dump()
    assert RecordedCall.from_wire(CapturedCall.model_validate(wire)) == call()
    for invalid in (
        {"weight_versions": [[str(10**20), 0, 2]]},
        {"weight_versions": [[2**31, 0, 2]]},
        {"weight_versions": [[-1, 0, 2]]},
        {"temperature": "nan"},
        {"temperature": "inf"},
    ):
        with pytest.raises(ValueError):
            RecordedCall.from_wire(CapturedCall.model_validate(wire | invalid))
