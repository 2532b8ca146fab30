"""What is acknowledged is on disk, whatever the disk does."""

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

from fakevllm_server.journal import store
from fakevllm_server.journal import writer as writing
from fakevllm_server.journal.changes import meta_set
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.writer import Change, JournalError, JournalWriter
from tests.swarm_server.journal.disks import LIMIT_S, Disk, Held, rows

BIG = "x" * 1_000_000
FACTS = 'SELECT "key" FROM meta ORDER BY rowid'


def facts(path: Path) -> list[str]:
    return [key for (key,) in rows(path, FACTS)]


async def test_what_is_acknowledged_is_on_disk(journal: Journal, path: Path) -> None:
    await journal.write(meta_set("a", "1"), meta_set("b", None))
    assert rows(path, "SELECT * FROM meta") == [("a", "1")]


async def test_nothing_is_acknowledged_before_it_is_on_disk(journal: Journal, path: Path) -> None:
    held = Held(journal)
    place = journal.put(meta_set("a", "1"))
    with pytest.raises(JournalError, match="the disk is slow"):
        await journal.wait_written(place, 0.02)
    assert facts(path) == []
    held.let_go()
    await journal.wait_written(place)
    assert facts(path) == ["a"]


async def test_a_full_disk_is_tried_again_until_it_has_room(journal: Journal, path: Path) -> None:
    disk = Disk(journal)
    disk.fill()
    patient = asyncio.ensure_future(journal.wait_written(journal.put(meta_set("big", BIG)), None))
    behind = journal.put(meta_set("small", "1"))
    with pytest.raises(JournalError, match="full"):
        await journal.wait_written(behind, 0.1)
    assert journal.error is not None and not patient.done()
    assert facts(path) == []
    disk.make_room()
    await journal.wait_written(behind, LIMIT_S)
    await patient
    assert facts(path) == ["big", "small"]
    assert journal.error is None


async def test_a_file_that_somebody_locks_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(writing, "RETRY_S", 0.01)
    journal = Journal(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    place = journal.put(meta_set("a", "1"))
    with pytest.raises(JournalError, match="locked"):
        await journal.wait_written(place, 0.1)
    other.execute("ROLLBACK")
    await journal.wait_written(place, LIMIT_S)
    other.close()
    journal.close()
    assert facts(path) == ["a"]


async def test_what_waits_goes_into_few_transactions_in_its_order(
    journal: Journal, path: Path
) -> None:
    commits: list[object] = []

    def count(db: Any) -> None:
        event.listen(db.engine, "commit", commits.append)

    journal.put(Change("count", count))
    assert journal.drain()
    held = Held(journal)
    many = [str(number) for number in range(500)]
    waits = [asyncio.ensure_future(journal.write(meta_set(name, ""))) for name in many]
    await asyncio.sleep(0)
    commits.clear()
    held.let_go()
    await asyncio.gather(*waits)
    assert facts(path) == many
    assert len(commits) == 2  # the held one, and all that came meanwhile


async def test_a_place_is_reached_in_any_order_and_again(journal: Journal) -> None:
    older = journal.put(meta_set("a", "1"))
    newer = journal.put(meta_set("b", "1"))
    await journal.wait_written(newer)
    await journal.wait_written(older, 0)
    await journal.wait_written(newer, 0)
    await journal.flush()


async def test_settled_is_not_said_while_something_waits(journal: Journal, path: Path) -> None:
    held = Held(journal)
    journal.put(meta_set("a", "1"))
    settled = asyncio.ensure_future(journal.flush())
    await asyncio.sleep(0)
    journal.put(meta_set("b", "1"))
    assert not settled.done()
    held.let_go()
    await settled
    assert facts(path) == ["a", "b"]


async def test_one_who_waits_no_more_takes_nobody_along(journal: Journal, path: Path) -> None:
    held = Held(journal)
    gone, stays = (asyncio.ensure_future(journal.write(meta_set(name, ""))) for name in "ab")
    await asyncio.sleep(0)
    gone.cancel()
    held.let_go()
    await stays
    assert gone.cancelled()
    assert facts(path) == ["a", "b"]


def test_a_loop_that_is_closed_meanwhile_takes_nobody_along(journal: Journal, path: Path) -> None:
    held = Held(journal)
    waits: list[asyncio.Future[None]] = []

    async def wait() -> None:
        waits.append(asyncio.ensure_future(journal.write(meta_set("a", ""))))
        await asyncio.sleep(0)

    asyncio.run(wait())
    assert waits[0].cancelled()
    held.let_go()
    asyncio.run(journal.write(meta_set("b", "")))
    assert facts(path) == ["a", "b"]


def test_closing_writes_what_waits(path: Path) -> None:
    journal = Journal(path)
    held = Held(journal)
    for number in range(50):
        journal.put(meta_set(str(number), ""))
    threading.Timer(0.02, held.let_go).start()
    journal.close()
    assert len(facts(path)) == 50


async def test_closing_tries_once_more_what_the_disk_refused(
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


async def test_a_close_that_cannot_write_tells_all_who_wait(
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


async def test_after_the_close_nothing_is_acknowledged(journal: Journal, path: Path) -> None:
    before = journal.put(meta_set("a", "1"))
    await asyncio.to_thread(journal.close)
    await journal.wait_written(before)
    with pytest.raises(JournalError, match="closed"):
        await asyncio.wait_for(journal.write(meta_set("b", "1")), LIMIT_S)
    assert facts(path) == ["a"]


async def test_an_unexpected_error_ends_the_writing_for_good() -> None:
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
        held = Held(journal)
        good = journal.put(meta_set("a", "1"))
        bad = journal.put(Change("bad", lambda db: db.exec_driver_sql("SELECT ?", (object(),))))
        held.let_go()
        for place in (good, bad):  # one transaction: all or nothing
            with pytest.raises(JournalError, match="is broken"):
                await journal.wait_written(place)
        await asyncio.wait_for(ended.wait(), LIMIT_S)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert facts(path) == []


async def test_a_journal_too_far_behind_takes_nothing_new(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_WAITING", 3)
    held = Held(journal)
    for number in range(3):
        journal.check_capacity()
        journal.put(meta_set(str(number), ""))
    assert journal.is_full
    with pytest.raises(JournalError, match="too many changes wait"):
        journal.check_capacity()
    held.let_go()
    await journal.flush()
    journal.check_capacity()
