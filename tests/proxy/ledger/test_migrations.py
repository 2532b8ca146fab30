"""Tests for the ledger's migrations: they create the tables of tables.py, each once."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from fakevllm.errors import LedgerError
from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.records import FeedbackRecord, GroupRecord, SiblingRecord
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.tables import FEEDBACK, GROUPS, METADATA, SIBLINGS, VIEWS
from tests.proxy.ledger.ledger_cases import call, drop_replicas, group, rows


def shape(path: Path) -> dict[str, Any]:
    db = sqlite3.connect(path)
    try:
        pragmas = ("table_info", "foreign_key_list", "index_list")
        return {
            f"{table} {pragma}": {row[1:] for row in db.execute(f"PRAGMA {pragma}({table})")}
            for table in METADATA.tables
            for pragma in pragmas
        }
    finally:
        db.close()


def test_the_migrations_create_the_tables_of_tables_py(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "migrated").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'created'}")
    METADATA.create_all(engine)
    engine.dispose()
    assert shape(tmp_path / "migrated") == shape(tmp_path / "created")


def test_the_views_have_the_columns_of_tables_py(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "migrated").close()
    db = sqlite3.connect(tmp_path / "migrated")
    for name, view in VIEWS.tables.items():
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({name})")]
        assert columns == view.columns.keys()
    db.close()


def test_the_columns_of_a_table_are_the_fields_of_its_record() -> None:
    sibling_columns = [field.name for field in fields(SiblingRecord)]
    assert SIBLINGS.columns.keys() == ["group_id", *sibling_columns]
    in_other_tables = {"siblings", "kept_answer"}
    group_columns = [
        field.name for field in fields(GroupRecord) if field.name not in in_other_tables
    ]
    assert GROUPS.columns.keys() == group_columns
    assert FEEDBACK.columns.keys() == [field.name for field in fields(FeedbackRecord)]


def test_opening_a_current_ledger_again_does_not_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger.open(path).close()
    before = path.read_bytes()
    Ledger.open(path).close()
    assert path.read_bytes() == before
    db = sqlite3.connect(path)
    names = [name for (name,) in db.execute("SELECT name FROM migrations ORDER BY name")]
    db.close()
    assert names == [migration.__name__ for migration in MIGRATIONS]


def test_the_calls_of_an_older_ledger_are_kept_and_have_no_replica(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    columns = "sibling, seq, prompt_ids, response_ids, logprobs, weight_version, shaped"
    query = f"SELECT {columns} FROM calls ORDER BY sibling, seq"
    ledger = Ledger.open(path)
    ledger.record(group())
    ledger.settle("g1", "pooled", None, 1, [[call(replica="replica-0")], [call(version=9)]])
    ledger.close()
    before = rows(path, query)
    with closing(sqlite3.connect(path)) as db, db:
        drop_replicas(db)
    assert rows(path, query) == before and len(before) == 2
    Ledger.open(path).close()
    assert rows(path, query) == before
    assert rows(path, "SELECT replica FROM calls") == [(None,), (None,)]


def test_the_migrations_are_numbered_in_order() -> None:
    names = [migration.__name__ for migration in MIGRATIONS]
    assert names == sorted(names)
    assert [name[:4] for name in names] == [f"m{i:03}" for i in range(1, len(names) + 1)]


def test_a_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger.open(path).close()
    db = sqlite3.connect(path)
    with db:
        db.execute("INSERT INTO migrations VALUES ('m999_future', 0)")
    db.close()
    with pytest.raises(LedgerError, match="newer fakevllm"):
        Ledger.open(path)


def test_a_failed_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def m002_broken(db: Any) -> None:
        db.exec_driver_sql("CREATE TABLE half (x)")
        db.exec_driver_sql("not sql")

    path = tmp_path / "ledger"
    with monkeypatch.context() as patch:
        patch.setattr("fakevllm.ledger.store.MIGRATIONS", [*MIGRATIONS, m002_broken])
        with pytest.raises(LedgerError):
            Ledger.open(path)
    db = sqlite3.connect(path)
    tables = db.execute("SELECT name FROM sqlite_master").fetchall()
    db.close()
    assert tables == []
    Ledger.open(path).close()
