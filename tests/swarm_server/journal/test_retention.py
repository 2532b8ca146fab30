"""What is bounded of what the journal keeps, and what nobody may miss of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection
from swarm_server.samples import call
from swarm_server.training.intakes import CLIENT, Lives, end_of

from fakevllm_server.episodes.registry import EpisodeRefused
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal import reads, retention
from fakevllm_server.training import checkpointing
from tests.swarm_server.journal.disks import Held

KEPT = 4
TABLES = ("episodes", "calls", "samples", "groups", "submissions")


@pytest.fixture
async def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lives]:
    """All of an hour ago and more, but the newest few."""
    monkeypatch.setattr(retention, "KEEP_NEWEST", KEPT)
    monkeypatch.setattr(retention, "KEEP_REPLIES_S", -1.0)
    monkeypatch.setattr(retention, "CHANGES_PER_ROUND", 1)
    monkeypatch.setattr(checkpointing, "KEEP", 1)
    found = Lives(tmp_path / "run")
    found.next(save_freq=1)
    await found.now.boot_trainer()
    yield found
    found.now.close()


async def train(lives: Lives, *names: str) -> None:
    for name in names:
        await lives.captured(name)
        await lives.end_group(name)
        assert await lives.now.step()


async def go_on(lives: Lives) -> None:
    """What is in memory is gone."""
    lives.next()
    await lives.now.boot_trainer()


async def pass_by(lives: Lives, num: int = 3 * KEPT) -> None:
    """Time, in groups."""
    await train(lives, *(f"{lives.now.log.last_step} {number}" for number in range(num)))


def num_rows(lives: Lives) -> dict[str, int]:
    assert lives.now.journal.drain()
    return lives.now.journal.read(_count)


def _count(db: Connection) -> dict[str, int]:
    query = "SELECT COUNT(*) FROM "
    return {table: db.exec_driver_sql(query + table).scalar_one() for table in TABLES}


async def test_the_rows_of_what_is_done_are_bounded(lives: Lives) -> None:
    for number in range(30):
        for reward in (0.0, 1.0):
            await lives.end((await lives.played()).uuid, reward, f"task {number}")
        assert await lives.now.step()
        await lives.end((await lives.played(kind="eval")).uuid)
        await lives.captured(f"aborted {number}")
        await lives.now.intake.abort_group(f"aborted {number}")
        await train(lives, f"g{number}")
    found = num_rows(lives)
    assert found["groups"] <= 2 * KEPT and found["submissions"] <= 2 * KEPT
    assert found["samples"] <= 4 * KEPT and found["episodes"] <= 4 * KEPT
    assert found["calls"] <= 4 * KEPT


async def test_the_log_and_its_counts_are_whole(lives: Lives) -> None:
    await train(lives, "a", "b")
    await pass_by(lives)
    num_steps, totals = lives.now.log.last_step, dict(lives.now.log.totals)
    await go_on(lives)
    told = [one.group_id for entry in lives.now.log.entries_after(0) for one in entry.groups]
    assert told[:2] == ["a", "b"] and len(told) == num_steps
    assert lives.now.log.totals == totals


async def test_an_end_that_is_sent_again_in_time_gets_its_reply(lives: Lives) -> None:
    uuid = (await lives.played()).uuid
    await lives.end(uuid)
    await lives.captured("g")
    reply = await lives.end_group("g")
    assert await lives.now.step()
    await pass_by(lives, KEPT - 2)
    await go_on(lives)
    before = lives.now.content()
    await lives.end(uuid)
    again = await lives.end_group("g")
    assert again == reply.model_copy(update={"calls": again.calls})
    with pytest.raises(IdempotencyConflict):
        await lives.end(uuid, 0.25)
    assert lives.now.content() == before


async def test_replies_are_kept_for_their_time_however_many_come(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEEP_REPLIES_S", 3600.0)
    uuid = (await lives.played()).uuid
    await lives.end(uuid)
    await train(lives, "g")
    await pass_by(lives)
    await go_on(lives)
    before = lives.now.content()
    assert "g" not in lives.groups
    await lives.end(uuid)
    assert (await lives.end_group("g")).pooled
    assert lives.now.content() == before


async def test_an_end_that_is_sent_again_too_late_is_refused_and_changes_nothing(
    lives: Lives,
) -> None:
    uuid = (await lives.played()).uuid
    await lives.end(uuid)
    await lives.end((await lives.played()).uuid, 0.0)
    assert await lives.now.step()
    await train(lives, "g")
    await pass_by(lives)
    await go_on(lives)
    before = lives.now.content()
    with pytest.raises(EpisodeRefused, match=f"^Episode {uuid} not found") as refused:
        await lives.end(uuid)
    assert refused.value.status == 400
    reply = await lives.end_group("g")
    assert (reply.success, reply.failure_reason) == (False, "unknown_group")
    assert lives.now.content() == before


async def test_feedback_is_never_trained_twice_however_late_it_is_sent_again(
    lives: Lives,
) -> None:
    """It brings its calls, so only its name can tell."""
    await lives.add_sample("said")
    assert await lives.now.step()
    await pass_by(lives)
    await go_on(lives)
    before = lives.now.content()
    assert lives.now.journal.read(reads.submission, "sample:said") is None
    reply = await lives.add_sample("said")
    assert (reply.success, reply.failure_reason) == (False, "already_trained")
    assert lives.now.content() == before


async def test_what_waits_is_not_forgotten(lives: Lives) -> None:
    """However old it is: a claim, an episode whose task is not complete, an open group."""
    claimed = await lives.played(call(1))
    await lives.end((await lives.played(call(2))).uuid, 1.0, "half")
    await lives.captured("open")
    await pass_by(lives)
    await go_on(lives)
    found = lives.now.waiting()
    assert [one.uuid for one in found.claimed] == [claimed.uuid]
    assert [calls for _, calls in found.samples] == [[call(2)]]
    assert list(found.open_groups) == ["open"]
    assert lives.now.intake.episodes.find_owned(claimed.uuid, CLIENT).calls == [call(1)]
    await lives.now.intake.end_episode(end_of(claimed.uuid, 0.0, "half"), 0.0, None)
    assert lives.now.intake.pool.num_finished == 1


async def test_a_group_that_waits_does_not_hold_up_those_behind_it(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_ROUND", 2)
    for number in range(5):
        await lives.add_sample(f"kept for ever {number}")
    await pass_by(lives, 10 * KEPT)
    assert len(lives.groups) <= 5 + 3 * KEPT


async def test_a_rush_is_forgotten_as_fast_as_it_comes(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all of it is written in one transaction."""
    monkeypatch.setattr(retention, "CHANGES_PER_ROUND", 10)
    monkeypatch.setattr(retention, "ROWS_PER_ROUND", 20)
    uuids = [(await lives.claimed(kind="eval")).uuid for _ in range(100)]
    for rush in uuids[:50], uuids[50:]:
        held = Held(lives.now.journal)
        ends = [asyncio.ensure_future(lives.end(uuid)) for uuid in rush]
        await asyncio.sleep(0)
        held.let_go()
        await asyncio.gather(*ends)
    found = num_rows(lives)
    assert (found["groups"], found["submissions"]) == (KEPT, KEPT)


async def test_a_clock_that_was_wrong_holds_up_nothing(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEEP_REPLIES_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("fakevllm_server.journal.changes.time.time", lambda: 4e9)
        await train(lives, "of the year 2096")
        assert lives.now.journal.drain()
    await pass_by(lives)
    assert lives.now.journal.read(reads.submission, "group:of the year 2096") is None


async def test_a_group_is_kept_until_no_checkpoint_can_need_it(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "KEEP", 1000)
    await pass_by(lives)
    for saved in lives.now.journal.read(reads.checkpoints)[:-1]:
        (lives.now.folder / "checkpoints" / saved.folder / "weights.json").write_text("[]")
    trained = [*lives.now.trainer.weights]
    await lives.now.boot_trainer()
    while await lives.now.step():
        pass
    assert lives.now.trainer.weights == trained
    assert not any(entry.lost for entry in lives.now.log.entries_after(0))


async def test_what_is_lost_with_a_checkpoint_is_told_though_its_rows_are_forgotten(
    lives: Lives,
) -> None:
    await lives.captured("best")
    await lives.end_group("best", 9.0, 0.0)
    assert await lives.now.step()
    await pass_by(lives)
    trained = [calls[0][0] for calls in lives.now.trainer.weights]
    newest = lives.now.journal.read(reads.checkpoints)[0]
    (lives.now.folder / "checkpoints" / newest.folder / "weights.json").write_text("[]")
    await lives.now.boot_trainer()
    assert lives.now.journal.drain()
    assert [name for entry in lives.now.log.entries_after(0) for name in entry.lost] == trained[1:]
    assert trained[0] == "best" and len(lives.now.trainer.weights) == 1
