"""Queries of a proxy's ledger, read with plain SQLite."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from tests.e2e.processes import Process, wait_until

SETTLE_TIMEOUT_S = 60.0


def ledger_file(proxy: Process) -> Path:
    return proxy.folder / "ledger.sqlite"


def rows(proxy: Process, sql: str, *values: object) -> list[Any]:
    """Return the rows of a query, whose values can be read by column name."""
    return rows_of_file(ledger_file(proxy), sql, *values)


def rows_of_file(file: Path, sql: str, *values: object) -> list[Any]:
    with contextlib.closing(sqlite3.connect(file)) as ledger:
        ledger.row_factory = sqlite3.Row
        return ledger.execute(sql, values).fetchall()


def wait_for_groups(
    proxy: Process, count: int, *, states: str = "served pooled trained dropped failed lost"
) -> list[Any]:
    """Wait until `count` groups are in one of the states, and return all groups, oldest first.

    The ledger is written shortly after the app's answer.
    """

    def matching() -> list[Any]:
        groups = rows(proxy, "select * from groups order by received_at")
        return [group for group in groups if group["state"] in states.split()]

    def enough() -> bool:
        return len(matching()) >= count

    wait_until(enough, SETTLE_TIMEOUT_S, f"{count} groups {states} in {ledger_file(proxy)}")
    return rows(proxy, "select * from groups order by received_at")
