"""Looks into a proxy's ledger, as `sqlite3` would."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from tests.e2e.processes import Process, wait_until

SETTLE_TIMEOUT_S = 20.0


def ledger_of(proxy: Process) -> Path:
    return proxy.folder / "ledger.sqlite"


def rows(proxy: Process, sql: str, *values: object) -> list[Any]:
    """Rows that can be asked by column name."""
    with contextlib.closing(sqlite3.connect(ledger_of(proxy))) as ledger:
        ledger.row_factory = sqlite3.Row
        return ledger.execute(sql, values).fetchall()


def wait_for_groups(
    proxy: Process, count: int, *, states: str = "served pooled trained dropped failed lost"
) -> list[Any]:
    """All groups, oldest first, once `count` of them are in one of the states: the ledger is
    written a moment after the app has been answered."""

    def found() -> list[Any]:
        groups = rows(proxy, "select * from groups order by received_at")
        return [group for group in groups if group["state"] in states.split()]

    def enough() -> bool:
        return len(found()) >= count

    wait_until(enough, SETTLE_TIMEOUT_S, f"{count} groups {states} in {ledger_of(proxy)}")
    return rows(proxy, "select * from groups order by received_at")
