"""Groups are selected with SQL that can read the ledger and do nothing else."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.errors import UserError
from fakevllm.ledger import selection
from fakevllm.ledger.selection import GroupSelection
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import group, sibling


def selected_groups(ledger: Path, where: str | None = None, last: int | None = None) -> list[str]:
    found = GroupSelection(ledger, where, last, min_answers=2).find()
    ids = list(found.ids())
    assert found.count == len(ids)
    return ids


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    store = Ledger.open(path)
    for number in range(4):
        store.record(group(f"g{number}", received_at=1000.0 + number, step=number))
    store.record(replace(group("evaluated"), kind="eval"))
    store.record(group("single", [1.0]))
    cut = replace(sibling(1), failure="broken_off")
    store.record(replace(group("broken_off"), siblings=[sibling(0), cut]))
    store.close()
    return path


def test_groups_with_two_answers_are_selected_oldest_first(ledger: Path) -> None:
    assert selected_groups(ledger) == ["g0", "g1", "g2", "g3"]


def test_a_condition_and_a_number_select_the_newest_matching_groups(ledger: Path) -> None:
    assert selected_groups(ledger, "step < 3 OR state = 'none'") == ["g0", "g1", "g2"]
    assert selected_groups(ledger, "step < 3", last=2) == ["g1", "g2"]
    assert selected_groups(ledger, last=1) == ["g3"]
    functions = "json_extract(request_json, '$.messages') IS NOT NULL -- a comment"
    assert len(selected_groups(ledger, functions)) == 4


class WithANewRequest(GroupSelection):
    """A selection from a ledger that gets a group between two of the selection's queries."""

    def _key(self, db: sqlite3.Connection, num_newer: int) -> tuple[float, str] | None:
        found = super()._key(db, num_newer)
        if num_newer == 0:
            store = Ledger.open(self.ledger)
            store.record(group("g9", received_at=1009.0))
            store.close()
        return found


def test_a_group_that_is_added_during_the_selection_takes_the_place_of_no_other(
    ledger: Path,
) -> None:
    assert list(WithANewRequest(ledger, last=3, min_answers=2).find().ids()) == ["g1", "g2", "g3"]
    assert selected_groups(ledger, last=3) == ["g2", "g3", "g9"]


def test_groups_without_enough_answers_are_selected_if_none_is_needed(ledger: Path) -> None:
    ids = list(GroupSelection(ledger).find().ids())
    assert ids == ["broken_off", "g0", "single", "g1", "g2", "g3"]


@pytest.mark.parametrize("last", [None, 1, 3, 6, 7, 50])
def test_pages_have_each_group_once_also_if_all_requests_came_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int | None
) -> None:
    monkeypatch.setattr(selection, "PAGE_ROWS", 2)
    store = Ledger.open(tmp_path / "ledger.sqlite")
    for number in range(7):
        store.record(group(f"g{number}"))
    store.close()
    ids = selected_groups(tmp_path / "ledger.sqlite", last=last)
    assert ids == [f"g{number}" for number in range(7)][-(last or 7) :]


def test_groups_that_are_recorded_later_are_not_selected(ledger: Path) -> None:
    found = GroupSelection(ledger, min_answers=2).find()
    store = Ledger.open(ledger)
    store.record(group("later", received_at=2000.0))
    store.close()
    assert list(found.ids()) == ["g0", "g1", "g2", "g3"]


@pytest.mark.parametrize(
    "where",
    [
        "",
        "step >",
        "1) UNION SELECT (1",
        "1) OR (1",
        "1); DROP TABLE group_rows; --",
        "1 ORDER BY step",
        "1, 2",
        "no_such_column = 1",
        "load_extension('x')",
        "writefile('x', 'y')",
        "(DELETE FROM group_rows)",
        "step = ?",
    ],
)
def test_what_is_not_an_expression_is_refused_with_an_example(ledger: Path, where: str) -> None:
    with pytest.raises(UserError, match=r"is not an SQL expression .* write one, such as"):
        selected_groups(ledger, where)
    with sqlite3.connect(ledger) as db:
        assert db.execute("SELECT COUNT(*) FROM group_rows").fetchone() == (7,)


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to be read as one" * 100)
    with pytest.raises(UserError, match="text cannot be read: file is not a database"):
        selected_groups(tmp_path / "text")


def test_a_condition_that_fails_on_a_group_is_named(ledger: Path) -> None:
    with pytest.raises(UserError, match=r"--where .* fails on a group: malformed JSON"):
        selected_groups(ledger, "json_extract(group_id, '$.a') = 1")


def test_ctrl_c_ends_a_slow_condition(ledger: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"
    ctrl_c = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ctrl_c.start()
            selected_groups(ledger, f"({endless}) > 0")
    finally:
        ctrl_c.join()
        signal.signal(signal.SIGINT, before)
