"""The journal deletes old rows, and keeps the rows that a client or checkpoint may need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection
from swarm_server.samples import call
from swarm_server.training.intake_server import CLIENT, IntakeServer, end_request

from fakevllm_adapters.protocol.swarm import AddLoggedGroupReply, EndGroupReply
from fakevllm_server.episodes.episode_registry import EpisodeRefused
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal import reads, retention
from fakevllm_server.training import checkpointing
from tests.swarm_server.journal.disk_faults import BlockedWriter

KEPT = 4
TABLES = ("episodes", "calls", "samples", "groups", "submissions")


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IntakeServer]:
    """A server that keeps only the newest rows, and has no minimum age for replies."""
    monkeypatch.setattr(retention, "KEEP_NEWEST", KEPT)
    monkeypatch.setattr(retention, "KEEP_REPLIES_S", -1.0)
    monkeypatch.setattr(retention, "CHANGES_PER_ROUND", 1)
    monkeypatch.setattr(checkpointing, "KEEP", 1)
    server = IntakeServer(tmp_path / "run")
    server.restart(save_freq=1)
    await server.process.boot_trainer()
    yield server
    server.process.close()


async def train(server: IntakeServer, *names: str) -> None:
    for name in names:
        await server.capture(name)
        await server.end_group(name)
        assert await server.process.step()


async def restart(server: IntakeServer) -> None:
    """Restart the server, so that it only knows the content of the journal."""
    server.restart()
    await server.process.boot_trainer()


async def check_trained_once(
    server: IntakeServer,
    prefix: str,
    add: Callable[[str], Awaitable[EndGroupReply | AddLoggedGroupReply]],
) -> None:
    """Check that what `add` sends is refused after it was trained and its contents were deleted.
    `prefix` is the prefix of its key in the journal."""
    name = "edit:g/f"
    await add(name)
    assert await server.process.step()
    await train_groups(server)
    await restart(server)
    before = server.process.content()
    assert server.process.journal.read(reads.submission, f"{prefix}{name}") is None
    reply = await add(name)
    assert (reply.success, reply.failure_reason) == (False, "already_trained")
    assert server.process.content() == before


async def train_groups(server: IntakeServer, num: int = 3 * KEPT) -> None:
    """Train this number of groups, so that older rows are no longer among the newest."""
    await train(server, *(f"{server.process.log.last_step} {number}" for number in range(num)))


def num_rows(server: IntakeServer) -> dict[str, int]:
    assert server.process.journal.drain()
    return server.process.journal.read(_count)


def _count(db: Connection) -> dict[str, int]:
    query = "SELECT COUNT(*) FROM "
    return {table: db.exec_driver_sql(query + table).scalar_one() for table in TABLES}


async def test_the_number_of_rows_of_completed_work_is_limited(server: IntakeServer) -> None:
    for number in range(30):
        for reward in (0.0, 1.0):
            await server.end((await server.play()).uuid, reward, f"task {number}")
        assert await server.process.step()
        await server.end((await server.play(kind="eval")).uuid)
        await server.capture(f"aborted {number}")
        await server.process.intake.abort_group(f"aborted {number}")
        await train(server, f"g{number}")
    found = num_rows(server)
    assert found["groups"] <= 2 * KEPT and found["submissions"] <= 2 * KEPT
    assert found["samples"] <= 4 * KEPT and found["episodes"] <= 4 * KEPT
    assert found["calls"] <= 4 * KEPT


async def test_the_run_log_and_its_totals_stay_complete(server: IntakeServer) -> None:
    await train(server, "a", "b")
    await train_groups(server)
    num_steps, totals = server.process.log.last_step, dict(server.process.log.totals)
    await restart(server)
    trained = [
        one.group_id for entry in server.process.log.entries_after(0) for one in entry.groups
    ]
    assert trained[:2] == ["a", "b"] and len(trained) == num_steps
    assert server.process.log.totals == totals


async def test_a_repeated_end_gets_its_reply_while_the_reply_is_kept(server: IntakeServer) -> None:
    uuid = (await server.play()).uuid
    await server.end(uuid)
    await server.capture("g")
    reply = await server.end_group("g")
    assert await server.process.step()
    await train_groups(server, KEPT - 2)
    await restart(server)
    before = server.process.content()
    await server.end(uuid)
    again = await server.end_group("g")
    assert again == reply.model_copy(update={"calls": again.calls, "prompts": again.prompts})
    with pytest.raises(IdempotencyConflict):
        await server.end(uuid, 0.25)
    assert server.process.content() == before


async def test_replies_are_kept_for_their_minimum_time(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEEP_REPLIES_S", 3600.0)
    uuid = (await server.play()).uuid
    await server.end(uuid)
    await train(server, "g")
    await train_groups(server)
    await restart(server)
    before = server.process.content()
    assert "g" not in server.groups
    await server.end(uuid)
    assert (await server.end_group("g")).pooled
    assert server.process.content() == before


async def test_an_end_that_is_repeated_too_late_is_refused_and_changes_nothing(
    server: IntakeServer,
) -> None:
    uuid = (await server.play()).uuid
    await server.end(uuid)
    await server.end((await server.play()).uuid, 0.0)
    assert await server.process.step()
    await train(server, "g")
    await train_groups(server)
    await restart(server)
    before = server.process.content()
    with pytest.raises(EpisodeRefused, match=f"^Episode {uuid} not found") as refused:
        await server.end(uuid)
    assert refused.value.status == 400
    reply = await server.end_group("g")
    assert (reply.success, reply.failure_reason) == (False, "unknown_group")
    assert server.process.content() == before


async def test_a_feedback_sample_is_never_trained_twice(
    server: IntakeServer,
) -> None:
    """A feedback sample contains its calls, so that only its id shows that it was trained."""
    await check_trained_once(server, "sample:", server.add_sample)


async def test_an_edit_is_never_trained_twice(server: IntakeServer) -> None:
    """A request for an edit contains the token ids, so that only its id shows that it was
    trained."""
    server.restart(demonstration_loss="sft", save_freq=1)
    await server.process.boot_trainer()
    await check_trained_once(server, "demonstration:", server.add_demonstration)


async def test_a_logged_group_is_never_trained_twice(server: IntakeServer) -> None:
    """A request for a logged group contains the calls, so that only its id shows that it was
    trained."""
    await check_trained_once(server, "logged:", server.add_logged_group)


async def test_waiting_work_is_never_deleted(server: IntakeServer) -> None:
    """This holds for a claim, for an episode of an incomplete task, and for an open group."""
    claimed = await server.play(call(1))
    await server.end((await server.play(call(2))).uuid, 1.0, "half")
    await server.capture("open")
    await train_groups(server)
    await restart(server)
    found = server.process.waiting()
    assert [one.uuid for one in found.claimed] == [claimed.uuid]
    assert [calls for _, calls in found.samples] == [[call(2)]]
    assert list(found.open_groups) == ["open"]
    assert server.process.intake.episodes.find_owned(claimed.uuid, CLIENT).calls == [call(1)]
    await server.process.intake.end_episode(end_request(claimed.uuid, 0.0, "half"), 0.0, None)
    assert server.process.intake.pool.num_finished == 1


async def test_a_waiting_group_does_not_prevent_the_deletion_of_later_groups(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_ROUND", 2)
    for number in range(5):
        await server.add_sample(f"kept for ever {number}")
    await train_groups(server, 10 * KEPT)
    assert len(server.groups) <= 5 + 3 * KEPT


async def test_rows_are_deleted_as_fast_as_they_are_added(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes of each burst are written in one transaction."""
    monkeypatch.setattr(retention, "CHANGES_PER_ROUND", 10)
    monkeypatch.setattr(retention, "ROWS_PER_ROUND", 20)
    uuids = [(await server.claim(kind="eval")).uuid for _ in range(100)]
    for rush in uuids[:50], uuids[50:]:
        blocked = BlockedWriter(server.process.journal)
        ends = [asyncio.ensure_future(server.end(uuid)) for uuid in rush]
        await asyncio.sleep(0)
        blocked.release()
        await asyncio.gather(*ends)
    found = num_rows(server)
    assert (found["groups"], found["submissions"]) == (KEPT, KEPT)


async def test_replies_from_the_future_are_deleted(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEEP_REPLIES_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("fakevllm_server.journal.row_changes.time.time", lambda: 4e9)
        await train(server, "of the year 2096")
        assert server.process.journal.drain()
    await train_groups(server)
    assert server.process.journal.read(reads.submission, "group:of the year 2096") is None


async def test_a_group_is_kept_until_no_checkpoint_needs_it(
    server: IntakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "KEEP", 1000)
    await train_groups(server)
    for saved in server.process.journal.read(reads.checkpoints)[:-1]:
        (server.process.folder / "checkpoints" / saved.folder / "weights.json").write_text("[]")
    trained = [*server.process.trainer.weights]
    await server.process.boot_trainer()
    while await server.process.step():
        pass
    assert server.process.trainer.weights == trained
    assert not any(entry.lost for entry in server.process.log.entries_after(0))


async def test_groups_lost_with_a_checkpoint_are_logged_even_if_their_rows_are_deleted(
    server: IntakeServer,
) -> None:
    await server.capture("best")
    await server.end_group("best", 9.0, 0.0)
    assert await server.process.step()
    await train_groups(server)
    trained = [calls[0][0] for calls in server.process.trainer.weights]
    newest = server.process.journal.read(reads.checkpoints)[0]
    (server.process.folder / "checkpoints" / newest.folder / "weights.json").write_text("[]")
    await server.process.boot_trainer()
    assert server.process.journal.drain()
    assert [
        name for entry in server.process.log.entries_after(0) for name in entry.lost
    ] == trained[1:]
    assert trained[0] == "best" and len(server.process.trainer.weights) == 1
