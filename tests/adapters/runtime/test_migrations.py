from __future__ import annotations

import pytest
from sqlalchemy import Connection, create_engine

from fakevllm_runtime.migrations import NewerSchemaError, migrate


def m001_table(db: Connection) -> None:
    db.exec_driver_sql("CREATE TABLE words (word TEXT)")


def m002_row(db: Connection) -> None:
    db.exec_driver_sql("INSERT INTO words VALUES ('one')")


def test_each_migration_runs_once_also_when_the_file_is_opened_again() -> None:
    with create_engine("sqlite://").begin() as db:
        migrate(db, [m001_table], "the file")
        migrate(db, [m001_table, m002_row], "the file")
        migrate(db, [m001_table, m002_row], "the file")
        assert db.exec_driver_sql("SELECT word FROM words").scalars().all() == ["one"]


def test_a_file_of_a_newer_version_is_refused_by_the_names_of_its_migrations() -> None:
    with create_engine("sqlite://").begin() as db:
        migrate(db, [m001_table, m002_row], "the file")
        with pytest.raises(NewerSchemaError, match=r"^m002_row$"):
            migrate(db, [m001_table], "the file")


def test_a_log_line_says_that_a_file_of_an_older_version_is_migrated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "fakevllm.migrations")
    with create_engine("sqlite://").begin() as db:
        migrate(db, [m001_table], "the ledger a.sqlite")
        assert caplog.messages == []  # a new file
        migrate(db, [m001_table, m002_row], "the ledger a.sqlite")
        migrate(db, [m001_table, m002_row], "the ledger a.sqlite")
    (line,) = caplog.messages
    assert line.startswith("the ledger a.sqlite was written by an older version")
    assert "(m002_row)" in line
