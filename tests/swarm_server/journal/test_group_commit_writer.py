"""Acknowledged changes are on disk, also when the disk fails."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from fakevllm_server.journal import group_commit_writer as writing
from fakevllm_server.journal import store
from fakevllm_server.journal.group_commit_writer import Change, JournalError, JournalWriter
from fakevllm_server.journal.row_changes import meta_set
from fakevllm_server.journal.store import Journal
from tests.swarm_server.journal.disk_faults import LIMIT_S, BlockedWriter, Disk, rows

BIG = "x" * 1_000_000
FACTS = 'SELECT "key" FROM meta ORDER BY rowid'


def facts(path: Path) -> list[str]:
    return [key for (key,) in rows(path, FACTS)]


async def test_an_acknowledged_change_is_on_disk(journal: Journal, path: Path) -> None:
    await journal.write(meta_set("a", "1"), meta_set("b", None))
    assert rows(path, "SELECT * FROM meta") == [("a", "1")]


async def test_no_change_is_acknowledged_before_it_is_on_disk(journal: Journal, path: Path) -> None:
    blocked = BlockedWriter(journal)
    position = journal.put(meta_set("a", "1"))
    with pytest.raises(JournalError, match="the disk is slow"):
        await journal.wait_written(position, 0.02)
    assert facts(path) == []
    blocked.release()
    await journal.wait_written(position)
    assert facts(path) == ["a"]


async def test_writing_to_a_full_disk_is_retried_until_there_is_space(
    journal: Journal, path: Path
) -> None:
    disk = Disk(journal)
    disk.fill()
    big_write = asyncio.ensure_future(journal.wait_written(journal.put(meta_set("big", BIG)), None))
    behind = journal.put(meta_set("small", "1"))
    with pytest.raises(JournalError, match="full"):
        await journal.wait_written(behind, 0.1)
    assert journal.error is not None and not big_write.done()
    assert facts(path) == []
    disk.free_space()
    await journal.wait_written(behind, LIMIT_S)
    await big_write
    assert facts(path) == ["big", "small"]
    assert journal.error is None


async def test_writing_to_a_locked_file_is_retried(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(writing, "RETRY_S", 0.01)
    journal = Journal(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    position = journal.put(meta_set("a", "1"))
    with pytest.raises(JournalError, match="locked"):
        await journal.wait_written(position, 0.1)
    other.execute("ROLLBACK")
    await journal.wait_written(position, LIMIT_S)
    other.close()
    journal.close()
    assert facts(path) == ["a"]


async def test_queued_changes_are_written_in_order_in_few_transactions(
    journal: Journal, path: Path
) -> None:
    commits: list[object] = []

    def count(db: Any) -> None:
        event.listen(db.engine, "commit", commits.append)

    journal.put(Change("count", count))
    assert journal.drain()
    blocked = BlockedWriter(journal)
    many = [str(number) for number in range(500)]
    waits = [asyncio.ensure_future(journal.write(meta_set(name, ""))) for name in many]
    await asyncio.sleep(0)
    commits.clear()
    blocked.release()
    await asyncio.gather(*waits)
    assert facts(path) == many
    assert len(commits) == 2  # the blocking change, and all changes that were queued meanwhile


async def test_positions_can_be_waited_for_in_any_order_and_repeatedly(journal: Journal) -> None:
    older = journal.put(meta_set("a", "1"))
    newer = journal.put(meta_set("b", "1"))
    await journal.wait_written(newer)
    await journal.wait_written(older, 0)
    await journal.wait_written(newer, 0)
    await journal.flush()


async def test_flush_waits_until_the_queue_is_empty(journal: Journal, path: Path) -> None:
    blocked = BlockedWriter(journal)
    journal.put(meta_set("a", "1"))
    flushed = asyncio.ensure_future(journal.flush())
    await asyncio.sleep(0)
    journal.put(meta_set("b", "1"))
    assert not flushed.done()
    blocked.release()
    await flushed
    assert facts(path) == ["a", "b"]


async def test_a_cancelled_waiter_does_not_affect_other_waiters(
    journal: Journal, path: Path
) -> None:
    blocked = BlockedWriter(journal)
    cancelled, other = (asyncio.ensure_future(journal.write(meta_set(name, ""))) for name in "ab")
    await asyncio.sleep(0)
    cancelled.cancel()
    blocked.release()
    await other
    assert cancelled.cancelled()
    assert facts(path) == ["a", "b"]


def test_a_closed_event_loop_does_not_affect_the_writer(journal: Journal, path: Path) -> None:
    blocked = BlockedWriter(journal)
    waits: list[asyncio.Future[None]] = []

    async def wait() -> None:
        waits.append(asyncio.ensure_future(journal.write(meta_set("a", ""))))
        await asyncio.sleep(0)

    asyncio.run(wait())
    assert waits[0].cancelled()
    blocked.release()
    asyncio.run(journal.write(meta_set("b", "")))
    assert facts(path) == ["a", "b"]


def test_closing_writes_the_queued_changes(path: Path) -> None:
    journal = Journal(path)
    blocked = BlockedWriter(journal)
    for number in range(50):
        journal.put(meta_set(str(number), ""))
    threading.Timer(0.02, blocked.release).start()
    journal.close()
    assert len(facts(path)) == 50


async def test_closing_retries_a_refused_transaction_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_S", LIMIT_S)
    journal = Journal(path)
    disk = Disk(journal)
    disk.refuse()
    with pytest.raises(JournalError, match="readonly"):
        await journal.wait_written(journal.put(meta_set("a", "1")), 0.1)
    disk.accept()
    await asyncio.to_thread(journal.close)
    assert facts(path) == ["a"]


async def test_a_close_that_cannot_write_fails_all_waiters(
    journal: Journal, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Disk(journal).refuse()
    waits = asyncio.ensure_future(journal.write(meta_set("a", "1")))
    await asyncio.sleep(0)
    await asyncio.to_thread(journal.close)
    with pytest.raises(JournalError):
        await asyncio.wait_for(waits, LIMIT_S)
    assert facts(path) == []
    assert "1 changes are lost" in caplog.text


async def test_no_change_is_acknowledged_after_the_close(journal: Journal, path: Path) -> None:
    before = journal.put(meta_set("a", "1"))
    await asyncio.to_thread(journal.close)
    await journal.wait_written(before)
    with pytest.raises(JournalError, match="closed"):
        await asyncio.wait_for(journal.write(meta_set("b", "1")), LIMIT_S)
    assert facts(path) == ["a"]


async def test_an_unexpected_error_stops_the_writer() -> None:
    started, may_go, broken = threading.Event(), threading.Event(), threading.Event()
    tried: list[Sequence[Change]] = []

    def transact(changes: Sequence[Change]) -> None:
        tried.append(changes)
        started.set()
        assert may_go.wait(LIMIT_S)
        raise ValueError("a defect")

    writer = JournalWriter(transact, broken.set)
    change = Change("any", lambda db: None)
    first = asyncio.ensure_future(writer.wait_written(writer.put(change)))
    second = asyncio.ensure_future(writer.wait_written(writer.put(change), LIMIT_S))
    await asyncio.to_thread(started.wait, LIMIT_S)
    await asyncio.sleep(0)
    may_go.set()
    for waits in (first, second):
        with pytest.raises(JournalError, match="is broken: a defect"):
            await waits
    with pytest.raises(JournalError, match="is broken: a defect"):
        await writer.wait_written(writer.put(change))
    assert broken.wait(LIMIT_S)
    assert len(tried) == 1
    assert not writer.drain(0.01)
    assert not writer.close(LIMIT_S)


async def test_a_broken_journal_ends_the_server(journal: Journal, path: Path) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    try:
        blocked = BlockedWriter(journal)
        good = journal.put(meta_set("a", "1"))
        bad = journal.put(Change("bad", lambda db: db.exec_driver_sql("SELECT ?", (object(),))))
        blocked.release()
        for position in (good, bad):  # one transaction: all or nothing
            with pytest.raises(JournalError, match="is broken"):
                await journal.wait_written(position)
        await asyncio.wait_for(ended.wait(), LIMIT_S)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert facts(path) == []


async def test_a_journal_with_too_many_queued_changes_refuses_new_ones(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_WAITING", 3)
    blocked = BlockedWriter(journal)
    for number in range(3):
        journal.check_capacity()
        journal.put(meta_set(str(number), ""))
    assert journal.is_full
    with pytest.raises(JournalError, match="too many changes wait"):
        journal.check_capacity()
    blocked.release()
    await journal.flush()
    journal.check_capacity()
