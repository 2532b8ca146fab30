"""Migrations create the tables of tables.py, and files that are not journals are refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from fakevllm_server.config.model import ConfigError
from fakevllm_server.journal import reads, tables
from fakevllm_server.journal.migrations import MIGRATIONS
from fakevllm_server.journal.row_changes import meta_set
from fakevllm_server.journal.store import Journal
from tests.swarm_server.journal.disk_faults import rows

METADATA = tables.Meta.metadata


def shape(path: Path) -> dict[str, Any]:
    """Return the columns and indexes of every table, with the columns of each index."""
    db = sqlite3.connect(path)
    try:
        schema: dict[str, Any] = {}
        for table in METADATA.tables:
            schema[f"{table} columns"] = [
                row[1:] for row in db.execute(f"PRAGMA table_info({table})")
            ]
            schema[f"{table} indexes"] = {
                (name, unique, tuple(row[2] for row in db.execute(f"PRAGMA index_info({name})")))
                for _, name, unique, *_ in db.execute(f"PRAGMA index_list({table})")
            }
        return schema
    finally:
        db.close()


def test_migrations_and_table_classes_agree(tmp_path: Path) -> None:
    Journal(tmp_path / "migrated").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'created'}")
    METADATA.create_all(engine)
    engine.dispose()
    migrated = shape(tmp_path / "migrated")
    assert migrated == shape(tmp_path / "created")
    assert all(migrated[f"{table} columns"] for table in METADATA.tables)
    names = {
        name
        for (name,) in rows(
            tmp_path / "migrated",
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
        )
    }
    assert names == {*METADATA.tables, "migrations"}


def test_migrations_are_in_the_order_of_their_names() -> None:
    names = [migration.__name__ for migration in MIGRATIONS]
    assert names == sorted(names)
    assert [name[:4] for name in names] == [f"m{i:03}" for i in range(1, len(names) + 1)]


async def test_opening_a_journal_again_migrates_nothing_and_keeps_its_rows(path: Path) -> None:
    journal = Journal(path)
    await journal.write(meta_set("a", "1"))
    journal.close()
    before = path.read_bytes()
    again = Journal(path)
    assert again.read(reads.meta, "a") == "1"
    again.close()
    assert path.read_bytes() == before
    names = [name for (name,) in rows(path, "SELECT name FROM migrations ORDER BY name")]
    assert names == [migration.__name__ for migration in MIGRATIONS]


def test_acknowledged_changes_survive_a_power_cut(journal: Journal) -> None:
    """Check the settings that SQLite documents as durable; its own durability is not tested."""
    pragmas = {name: journal.read(_pragma, name) for name in ("journal_mode", "synchronous")}
    assert pragmas == {"journal_mode": "wal", "synchronous": 2}  # FULL


def test_a_newer_journal_is_refused(path: Path) -> None:
    Journal(path).close()
    db = sqlite3.connect(path)
    with db:
        db.execute("INSERT INTO migrations VALUES ('m999_future', 0)")
    db.close()
    with pytest.raises(ConfigError, match=r"newer version.*m999_future.*update fakevllm"):
        Journal(path)


def test_a_migration_that_fails_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def m002_broken(db: Any) -> None:
        db.exec_driver_sql("CREATE TABLE half (x)")
        db.exec_driver_sql("not sql")

    with monkeypatch.context() as patch:
        patch.setattr("fakevllm_server.journal.store.MIGRATIONS", [*MIGRATIONS, m002_broken])
        with pytest.raises(ConfigError, match="cannot be opened"):
            Journal(path)
    assert rows(path, "SELECT name FROM sqlite_master") == []
    Journal(path).close()


def test_claims_from_before_the_owner_migration_have_no_owner(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fakevllm_server.journal.store.MIGRATIONS", MIGRATIONS[:1])
        Journal(path).close()
    db = sqlite3.connect(path)
    with db:
        values = ("a" * 28, 1, "claimed", "train", "me", "sk-ajet-1-x", 60.0)
        db.execute("INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    db.close()
    journal = Journal(path)
    (episode,) = journal.read(reads.pending_work, 5.0).claimed
    assert (episode.client_uuid, episode.key, episode.owner) == ("me", "sk-ajet-1-x", "")
    journal.close()


def test_a_journal_from_before_releases_has_no_decisions_and_keeps_its_checkpoints(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [migration.__name__ for migration in MIGRATIONS]
    with monkeypatch.context() as patch:
        before = MIGRATIONS[: names.index("m007_releases")]
        patch.setattr("fakevllm_server.journal.store.MIGRATIONS", before)
        Journal(path).close()
    db = sqlite3.connect(path)
    with db:
        db.execute("INSERT INTO checkpoints VALUES (4, 'step-00000004', 5, 'digest', 0.5, 1.0)")
    db.close()
    journal = Journal(path)
    assert journal.read(reads.releases) == journal.read(reads.side_checkpoints) == []
    assert journal.read(reads.checkpoint_folders) == ["step-00000004"]
    journal.close()


def test_an_empty_file_becomes_a_journal(path: Path) -> None:
    path.touch()
    journal = Journal(path)
    assert journal.read(reads.log_position) == reads.LogPosition(0, 0, 0)
    journal.close()


def test_a_file_that_is_no_journal_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database, it is a text of some length" * 50)
    (tmp_path / "folder").mkdir()
    for bad in (tmp_path / "text", tmp_path / "folder", tmp_path / "text" / "journal"):
        with pytest.raises(ConfigError, match="repair it, or choose another --run-dir"):
            Journal(bad)


async def test_a_damaged_journal_is_refused_at_the_first_reads(path: Path) -> None:
    journal = Journal(path)
    await journal.write(*(meta_set(str(number), "x" * 1000) for number in range(100)))
    journal.close()
    (page_size,) = rows(path, "PRAGMA page_size")[0]
    raw = bytearray(path.read_bytes())
    raw[-5 * page_size :] = b"\xa5" * (5 * page_size)
    path.write_bytes(raw)
    again = Journal(path)
    with pytest.raises(ConfigError, match=r"is damaged .*repair it"), again.opening():
        pass


def _pragma(db: Any, name: str) -> Any:
    return db.exec_driver_sql(f"PRAGMA {name}").scalar()
