"""The console and a ledger that is missing, older, newer, damaged, locked, or being written."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fakevllm.errors import LedgerError
from fakevllm.ledger import read_only_ledger
from fakevllm.ledger.group_reads import GroupSearch
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.store import Ledger
from tests.proxy.console.console_rig import open_console
from tests.proxy.ledger.ledger_cases import group, make_older

PAGES = [
    *("/learning", "/groups", "/groups/g1", "/sessions", "/sessions/s1"),
    *("/feedback", "/feedback/g1", "/evaluations", "/evaluations/e1"),
]


def fill(path: Path, num: int = 3) -> None:
    ledger = Ledger.open(path)
    for number in range(num):
        ledger.record(group(f"g{number}", received_at=1000.0 + number))
    ledger.close()


def expect_readable(path: Path) -> None:
    with ReadOnlyLedger(path).reading():
        pass


@contextmanager
def as_another_user() -> Generator[None]:
    """Give this process the rights of another user in the `with` block."""
    os.seteuid(65534)  # a user without any rights, such as `nobody`
    try:
        yield
    finally:
        os.seteuid(0)


async def expect_sentence(path: Path, *words: str) -> None:
    """Check that each page shows one sentence with these words, and that Now still works."""
    async with open_console(path) as rig:
        for url in PAGES:
            reply = await rig.browser.get(url)
            assert reply.status_code == 503, url
            assert "Traceback" not in reply.text
            for word in words:
                assert word in reply.text, (url, word)
        now = await rig.get("/")
        for word in words:
            assert word in now


async def test_a_missing_ledger_is_explained_and_not_created(path: Path) -> None:
    await expect_sentence(path, "There is no ledger", "fakevllm serve")
    assert not path.parent.exists()


async def test_a_ledger_that_appears_and_disappears_is_shown_while_it_is_there(path: Path) -> None:
    async with open_console(path) as rig:
        assert (await rig.browser.get("/groups")).status_code == 503
        fill(path)
        assert "1+1?" in await rig.get("/groups")
        shutil.rmtree(path.parent)
        assert (await rig.browser.get("/groups")).status_code == 503


async def test_an_older_ledger_is_explained_and_not_migrated(path: Path) -> None:
    fill(path)
    make_older(path)
    before = path.read_bytes()
    await expect_sentence(path, "older version", "start the proxy of this version once")
    assert path.read_bytes() == before


async def test_a_newer_ledger_is_explained(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO migrations VALUES ('m999_later', 0)")
    await expect_sentence(path, "newer version", "update")


async def test_a_file_that_is_no_ledger_is_explained(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    await expect_sentence(path, "is damaged, or is not a ledger")
    assert path.read_bytes() == b"not a database" * 100


async def test_a_ledger_that_is_just_being_created_is_not_called_damaged(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    await expect_sentence(path, "There is no ledger", "fakevllm serve")
    assert path.read_bytes() == b""


async def test_a_database_of_another_program_is_explained(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE t (x)")
    await expect_sentence(path, "is not a ledger", "no table <code>migrations</code>")


def test_a_ledger_that_needs_write_access_is_not_called_damaged(path: Path) -> None:
    fill(path)
    reader = ReadOnlyLedger(path)
    with pytest.raises(LedgerError, match=r"cannot be opened \(.*the user who"), reader.reading():
        reader._connect().execute("DELETE FROM group_rows")  # pyright: ignore[reportPrivateUsage]


def test_an_error_that_is_no_damage_is_not_called_damage(path: Path) -> None:
    fill(path)
    reader = ReadOnlyLedger(path)
    with pytest.raises(LedgerError, match=r"could not be read \(no such tab"), reader.reading():
        reader._connect().execute("SELECT * FROM t")  # pyright: ignore[reportPrivateUsage]


async def test_a_path_that_cannot_be_looked_up_is_explained(path: Path) -> None:
    path.parent.mkdir()
    await expect_sentence(path.parent / ("x" * 300), "could not be read (File name too long)")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_folder_that_another_user_has_closed_is_explained(path: Path) -> None:
    fill(path)
    path.parent.chmod(0o700)
    with as_another_user(), pytest.raises(LedgerError, match="owns the file"):
        expect_readable(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_healthy_ledger_of_another_user_is_not_called_damaged() -> None:
    with TemporaryDirectory() as name:  # every user may enter its parent, unlike pytest's folders
        path = Path(name) / "ledger.sqlite"
        fill(path)
        path.parent.chmod(0o755)
        path.chmod(0o644)
        with as_another_user(), pytest.raises(LedgerError, match="owns the file"):
            expect_readable(path)


async def test_a_folder_in_place_of_the_ledger_is_explained(path: Path) -> None:
    path.mkdir(parents=True)
    await expect_sentence(path, "is not a file")


async def test_damaged_pages_are_explained(path: Path) -> None:
    fill(path, num=200)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    for at in range(8 * 4096, len(content), 4096):
        content[at : at + 200] = b"\xff" * 200
    path.write_bytes(content)
    async with open_console(path) as rig:
        reply = await rig.browser.get("/groups")
        assert reply.status_code == 503 and "is damaged" in reply.text


async def test_a_ledger_that_another_process_locks_is_explained(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    monkeypatch.setattr("fakevllm_runtime.read_only.BUSY_TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        await expect_sentence(path, "Another process", "load this page again")


async def test_pages_work_while_the_ledger_is_written(path: Path, ledger: Ledger) -> None:
    stopped = threading.Event()

    def write() -> None:
        number = 0
        while not stopped.wait(0.001):
            ledger.record(group(f"w{number}", received_at=1000.0 + number))
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        async with open_console(path) as rig:
            for _ in range(10):
                await rig.get("/groups")
                await rig.get("/")
    finally:
        stopped.set()
        writer.join()
    assert ledger.drain() and ledger.health.ok and ledger.health.dropped == 0


def test_the_reader_cannot_write(path: Path) -> None:
    fill(path)
    reader = ReadOnlyLedger(path)
    with reader.reading(), pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._connect().execute("DELETE FROM group_rows")  # pyright: ignore[reportPrivateUsage]


async def test_only_the_two_files_of_sqlite_appear_beside_a_ledger_without_a_proxy(
    path: Path,
) -> None:
    fill(path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    async with open_console(path) as rig:
        for url in ("/", "/learning", "/groups", "/sessions"):
            await rig.get(url)
    after = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    own = {f"{path.name}-wal": b"", f"{path.name}-shm": after.get(f"{path.name}-shm", b"")}
    assert after == before | {name: own[name] for name in own if name in after}


def test_a_read_that_takes_too_long_is_ended_and_explained(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, num=50)
    monkeypatch.setattr(read_only_ledger, "STEPS_BETWEEN_CHECKS", 10)
    reader = ReadOnlyLedger(path, timeout_s=-1.0)
    with pytest.raises(LedgerError, match="could not be read within"), reader.reading():
        reader.groups.search(GroupSearch(text="nothing"), 10)


def test_all_reads_of_one_page_share_one_time_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    monkeypatch.setattr(read_only_ledger, "STEPS_BETWEEN_CHECKS", 10)
    reader = ReadOnlyLedger(path, timeout_s=0.5)
    with pytest.raises(LedgerError, match="could not be read within"), reader.reading():
        time.sleep(0.6)
        reader.groups.search(GroupSearch(), 10)
    with reader.reading():
        reader.groups.search(GroupSearch(), 10)


def test_the_state_of_the_files_changes_with_each_write(path: Path, ledger: Ledger) -> None:
    reader = ReadOnlyLedger(path)
    before = reader.state_of_files()
    assert reader.state_of_files() == before
    ledger.record(group("g1"))
    assert ledger.drain()
    assert reader.state_of_files() != before
