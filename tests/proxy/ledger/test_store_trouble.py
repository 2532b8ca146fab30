"""Faults of the ledger's file lose writes, which are counted, but never fail a request."""

from __future__ import annotations

import resource
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.errors import LedgerError
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import (
    group,
    rows,
    state,
    trained,
)


def test_closing_writes_the_queued_changes(path: Path) -> None:
    ledger = Ledger.open(path)
    for index in range(50):
        ledger.record(group(f"g{index}"))
    ledger.close()
    assert rows(path, "SELECT COUNT(*) FROM groups") == [(50,)]
    reopened = Ledger.open(path)
    assert reopened.counts() == {"scored": 50}
    reopened.close()


def test_one_failed_write_does_not_affect_the_others_of_its_flush(ledger: Ledger) -> None:
    ledger.record(group("good-1"))
    ledger.record(replace(group("bad"), question="\ud800"))
    ledger.record(group("good-2"))
    assert ledger.drain()
    assert ledger.health.dropped == 1
    assert ledger.counts() == {"scored": 2}


def test_a_locked_file_loses_writes_but_no_requests_and_recovers(
    ledger: Ledger, path: Path
) -> None:
    other = sqlite3.connect(path)
    try:
        other.execute("BEGIN IMMEDIATE")
        ledger.record(group("while-locked"))
        assert ledger.drain()
        assert not ledger.health.ok
        assert ledger.health.dropped == 1
        assert "locked" in (ledger.health.error or "")
        other.rollback()
    finally:
        other.close()
    ledger.record(group("after"))
    assert ledger.drain()
    assert ledger.health.ok
    assert ledger.group("while-locked") is None
    assert ledger.group("after") is not None


async def test_each_change_of_a_flush_has_its_own_outcome(ledger: Ledger, path: Path) -> None:
    good = ledger.record(group("good"))
    bad = ledger.record(replace(group("bad"), question="\ud800"))
    later = ledger.record(group("later"))
    assert await ledger.is_written(good, later)
    assert not await ledger.is_written(bad)
    assert not await ledger.is_written(good, bad)
    assert (good.error, later.error) == (None, None)
    assert "surrogates not allowed" in (bad.error or "")
    other = sqlite3.connect(path)
    try:
        other.execute("BEGIN IMMEDIATE")
        unwritten = ledger.record(group("while-locked"))
        assert not await ledger.is_written(unwritten, timeout_s=0.01), "it is not written yet"
    finally:
        other.close()


def test_a_full_disk_loses_writes_but_no_requests_and_recovers(ledger: Ledger, path: Path) -> None:
    big = replace(group("big"), request_json="x" * 2_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        ledger.record(big)
        assert ledger.drain()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (ledger.health.ok, ledger.health.dropped) == (False, 1)
    ledger.record(big)
    assert ledger.drain()
    assert ledger.health.ok
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


def test_log_entries_that_could_not_be_written_count_when_read_again(
    ledger: Ledger, path: Path
) -> None:
    ledger.record(group())
    assert ledger.drain()
    other = sqlite3.connect(path)
    try:
        other.execute("BEGIN IMMEDIATE")
        ledger.apply_log("run", [trained(1, "g1")])
        assert ledger.drain()
    finally:
        other.close()
    assert ledger.log_cursor("run") == 0
    ledger.apply_log("run", [trained(1, "g1")])
    assert state(ledger) == ("trained", None)


def test_a_full_queue_drops_writes_and_counts_them(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fakevllm.ledger.writer.QUEUE_BOUND", 3)
    small = Ledger.open(path, busy_timeout_s=20)
    other = sqlite3.connect(path)
    try:
        other.execute("BEGIN IMMEDIATE")
        for index in range(2_000):
            small.record(group(f"g{index}"))
        assert small.health.dropped > 0
        assert small.health.waiting <= 3
        assert not small.health.ok
    finally:
        other.close()
    small.close()
    assert sum(ledger.counts().values()) == 2_000 - small.health.dropped


def test_a_path_that_cannot_be_a_ledger_is_refused_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database, it is a text of some length" * 50)
    (tmp_path / "folder").mkdir()
    for bad in (tmp_path / "text", tmp_path / "folder", tmp_path / "text" / "ledger"):
        with pytest.raises(LedgerError, match="move it away or name another"):
            Ledger.open(bad)


def test_special_characters_in_the_path_are_accepted(tmp_path: Path) -> None:
    special = tmp_path / "a ?#%20ü.sqlite"
    Ledger.open(special).close()
    assert special.exists()
