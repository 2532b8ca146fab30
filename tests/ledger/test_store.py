"""The ledger keeps what it is told, reads it back, and never gets in the app's way."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import stat
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakevllm.errors import LedgerError
from fakevllm.ledger.records import GroupRecord, ScoredGroup, SiblingRecord, StepRow
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.swarm import Task
from tests.ledger.ledger_cases import call, dropped, group, restored, sibling, trained


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(path, busy_timeout_s=0.05)
    yield opened
    opened.close()


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """As another process would read it."""
    other = sqlite3.connect(path)
    try:
        return other.execute(query).fetchall()
    finally:
        other.close()


def state(ledger: Ledger, group_id: str = "g1") -> tuple[str, str | None]:
    assert ledger.drain()
    found = ledger.group(group_id)
    assert found is not None
    return found.state, found.reason


def marks(ledger: Ledger, group_id: str = "g1") -> list[bool]:
    assert ledger.drain()
    found = ledger.group(group_id)
    assert found is not None
    return [one.trained for one in found.siblings]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
MAYBE_TEXT = st.none() | TEXT
FINITE = st.floats(allow_nan=False, allow_infinity=False)
MAYBE_INT = st.none() | st.integers(0, 2**40)
SIBLING = st.builds(
    SiblingRecord,
    index=st.integers(0, 300),
    served=st.booleans(),
    best=st.booleans(),
    status=st.integers(0, 599),
    message_json=MAYBE_TEXT,
    text=MAYBE_TEXT,
    tool_calls_json=MAYBE_TEXT,
    finish_reason=MAYBE_TEXT,
    prompt_tokens=MAYBE_INT,
    completion_tokens=MAYBE_INT,
    reward=st.none() | FINITE,
    annotations_json=MAYBE_TEXT,
    error=MAYBE_TEXT,
)
GROUP = st.builds(
    GroupRecord,
    group_id=TEXT,
    received_at=FINITE,
    route=TEXT,
    model=TEXT,
    streamed=st.booleans(),
    task_id=MAYBE_TEXT,
    app_key=MAYBE_TEXT,
    request_json=TEXT,
    question=TEXT,
    num_siblings=st.integers(1, 256),
    status=st.integers(0, 599),
    latency_s=FINITE,
    served_index=MAYBE_INT,
    best_index=MAYBE_INT,
    state=TEXT,
    reason=MAYBE_TEXT,
    hook_hash=MAYBE_TEXT,
    step=MAYBE_INT,
    siblings=st.lists(SIBLING, max_size=3, unique_by=lambda one: one.index),
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(GROUP)
def test_a_group_reads_back_as_it_was_recorded(ledger: Ledger, record: GroupRecord) -> None:
    ledger.record(record)
    assert ledger.drain()
    in_order = sorted(record.siblings, key=lambda one: one.index)
    assert ledger.group(record.group_id) == replace(record, siblings=in_order)


def test_an_unknown_group_is_none(ledger: Ledger) -> None:
    assert ledger.group("nothing") is None
    assert ledger.latest_group() is None


def test_a_group_recorded_twice_is_there_once(ledger: Ledger, path: Path) -> None:
    ledger.record(group("g1", [0.0, 1.0, 0.5]))
    ledger.record(group("g1", [1.0, 1.0]))
    assert ledger.drain()
    assert rows(path, "SELECT reward FROM siblings") == [(1.0,), (1.0,)]
    assert ledger.counts() == {"scored": 1}


def test_the_file_is_private_and_its_folder_too(ledger: Ledger, path: Path) -> None:
    ledger.record(group())
    assert ledger.drain()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()} == {0o600}


def test_calls_are_stored_as_little_endian_blobs(ledger: Ledger, path: Path) -> None:
    ledger.record(group())
    ledger.settle("g1", "pooled", None, 4, [[call()], [call(logprobs=None), call(version=9)]])
    assert state(ledger) == ("pooled", None)
    found = rows(
        path,
        "SELECT sibling, seq, prompt_ids, response_ids, logprobs, weight_version,"
        " weight_versions_json FROM calls ORDER BY sibling, seq",
    )
    ids, logprobs = array("i", [1, 2, 300]).tobytes(), array("f", [-0.5, -0.25]).tobytes()
    response = array("i", [70000, 5]).tobytes()
    assert found == [
        (0, 0, ids, response, logprobs, 3, "[[3,0,1],[4,1,2]]"),
        (1, 0, ids, response, None, 3, "[[3,0,1],[4,1,2]]"),
        (1, 1, ids, response, logprobs, 9, "[[9,0,1],[10,1,2]]"),
    ]
    assert rows(path, "SELECT step FROM groups") == [(4,)]


def test_settling_an_unrecorded_group_writes_nothing(ledger: Ledger, path: Path) -> None:
    ledger.settle("nobody", "pooled", None, 1, [[call()]])
    assert ledger.drain()
    assert rows(path, "SELECT * FROM calls") == []
    assert ledger.health.ok


def test_a_step_in_the_log_trains_its_groups_and_siblings(ledger: Ledger) -> None:
    ledger.record(group("g1", [0.0, 1.0, 0.5]))
    ledger.record(group("g2"))
    ledger.apply_log("run", [trained(1, "g1", step=7, siblings=[0, 2])])
    assert state(ledger) == ("trained", None)
    assert state(ledger, "g2") == ("scored", None)
    assert marks(ledger) == [True, False, True]
    found = ledger.group("g1")
    assert found is not None and (found.trained_step, found.trained_version) == (7, 7)


def test_a_late_settlement_does_not_undo_what_the_log_said(ledger: Ledger, path: Path) -> None:
    for group_id in ("g1", "g2"):
        ledger.record(group(group_id))
    ledger.apply_log("run", [trained(1, "g1"), dropped(2, g2="stale")])
    for group_id in ("g1", "g2"):
        ledger.settle(group_id, "pooled", None, 3, [[call()]])
    assert state(ledger, "g1") == ("trained", None)
    assert state(ledger, "g2") == ("dropped", "stale")
    assert rows(path, "SELECT COUNT(*), MIN(step) FROM calls JOIN groups USING (group_id)") == [
        (2, 3)
    ]


def test_groups_a_crash_undid_are_lost_and_unmarked(ledger: Ledger) -> None:
    ledger.record(group())
    ledger.apply_log("run", [trained(1, "g1")])
    ledger.apply_log("run", [trained(1, "g1"), restored(5, "g1")])
    assert state(ledger) == ("lost", "server_crashed")
    assert marks(ledger) == [False, False]
    found = ledger.group("g1")
    assert found is not None and (found.trained_step, found.trained_version) == (None, None)


def test_each_run_has_its_own_cursor(ledger: Ledger) -> None:
    ledger.apply_log("run-a", [trained(4)])
    ledger.apply_log("run-b", [trained(2)])
    assert ledger.drain()
    cursors = [ledger.log_cursor(run) for run in ("run-a", "run-b", "run-c")]
    assert cursors == [4, 2, 0]


def test_the_curve_counts_ties_and_keeps_policy_and_service_apart(ledger: Ledger) -> None:
    ledger.record(group("a", [0.0, 1.0], served=1, step=1))
    ledger.record(group("b", [0.5, 0.5, None], served=0, step=1))
    ledger.record(group("c", [0.25, 0.5], served=1, step=2))
    ledger.record(group("d", [None, None], step=2))
    ledger.record(group("e", [1.0, 1.0]))
    ledger.record(group("f", [None, 0.75], served=0, step=3))
    assert ledger.drain()
    assert ledger.curve() == [
        StepRow(1, 2, policy_mean=0.5, returned_best=0.75, without_signal=1),
        StepRow(2, 1, policy_mean=0.375, returned_best=0.5, without_signal=0),
        StepRow(3, 1, policy_mean=0.75, returned_best=None, without_signal=1),
    ]


def test_the_latest_group_with_two_answers_is_given_to_hooks(ledger: Ledger) -> None:
    failed = SiblingRecord(index=1, served=False, best=False, status=500, error="broken")
    lone = replace(group("new", received_at=3.0), siblings=[sibling(0), failed])
    partial = replace(
        group("g", received_at=2.0, task_id="t"), siblings=[sibling(0), failed, sibling(2)]
    )
    for record in (partial, lone, group("old", received_at=1.0)):
        ledger.record(record)
    ledger.put_tasks([Task(task_id="t", metadata={"answer": "2"})])
    assert ledger.drain()
    latest = ledger.latest_group()
    assert latest is not None and latest.request_id == "g"
    assert [answer["content"] for answer in latest.answers] == ["answer 0", "answer 2"]
    assert latest.siblings()[1].usage == {"prompt_tokens": 5, "completion_tokens": 3}
    assert latest.siblings()[0].task.metadata == {"answer": "2"}
    assert latest.answers[0]["finish_reason"] == "stop"


def test_tasks_are_put_once_and_read_back(ledger: Ledger) -> None:
    first = Task(task_id="t1", main_query="1+1?", metadata={"answer": "2"})
    ledger.put_tasks([first, Task(task_id="t2")])
    ledger.put_tasks([first.model_copy(update={"metadata": {"answer": "two"}})])
    assert ledger.drain()
    assert {task.task_id: task.metadata for task in ledger.tasks()} == {
        "t1": {"answer": "two"},
        "t2": {},
    }


async def test_flush_waits_without_blocking_the_loop(ledger: Ledger) -> None:
    ledger.record(group())
    assert await asyncio.wait_for(ledger.flush(), 10)
    assert ledger.counts() == {"scored": 1}


def test_closing_writes_what_waits(path: Path) -> None:
    ledger = Ledger.open(path)
    for index in range(50):
        ledger.record(group(f"g{index}"))
    ledger.close()
    assert rows(path, "SELECT COUNT(*) FROM groups") == [(50,)]
    reopened = Ledger.open(path)
    assert reopened.counts() == {"scored": 50}
    reopened.close()


def test_one_bad_write_does_not_take_its_company_along(ledger: Ledger) -> None:
    ledger.record(group("good-1"))
    ledger.record(replace(group("bad"), question="\ud800"))
    ledger.record(group("good-2"))
    assert ledger.drain()
    assert ledger.health.dropped == 1
    assert ledger.counts() == {"scored": 2}


def test_a_locked_file_costs_writes_not_requests_and_recovers(ledger: Ledger, path: Path) -> None:
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


def test_a_full_disk_costs_writes_not_requests_and_recovers(ledger: Ledger, path: Path) -> None:
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


def test_a_log_that_could_not_be_written_counts_when_it_is_brought_again(
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


def test_a_full_queue_drops_and_counts(
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


def test_another_process_reads_while_the_ledger_is_open(ledger: Ledger, path: Path) -> None:
    ledger.record(group())
    assert ledger.drain()
    program = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2]))"
    query = 'SELECT "index", reward FROM siblings'
    read = subprocess.run(
        [sys.executable, "-c", program, path, query], capture_output=True, text=True, timeout=30
    )
    assert read.stdout == "(0, 0.0) (1, 1.0)\n"


def test_a_path_that_cannot_be_a_ledger_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database, it is a text of some length" * 50)
    (tmp_path / "folder").mkdir()
    for bad in (tmp_path / "text", tmp_path / "folder", tmp_path / "text" / "ledger"):
        with pytest.raises(LedgerError, match="move it away or name another"):
            Ledger.open(bad)


def test_odd_characters_in_the_path_are_just_a_path(tmp_path: Path) -> None:
    odd = tmp_path / "a ?#%20ü.sqlite"
    Ledger.open(odd).close()
    assert odd.exists()


def test_the_queries_of_the_readme_run(ledger: Ledger, path: Path) -> None:
    ledger.record(group("a", [0.0, 1.0], served=1, step=1))
    ledger.record(replace(group("b", state="dropped"), reason="hook_nan"))
    assert ledger.drain()
    readme = (Path(__file__).parents[2] / "fakevllm" / "ledger" / "README.md").read_text()
    indented = [line for line in readme.splitlines() if line.startswith("    ")]
    why, learning, least = " ".join(indented).split(";")[:3]
    assert sorted(rows(path, why)) == [("dropped", "hook_nan", 1), ("scored", None, 1)]
    assert rows(path, learning) == [(1, 0.5, 1.0)]
    assert len(rows(path, least)) == 4


def test_a_trained_group_whose_settling_was_cut_off_is_on_the_curve(ledger: Ledger) -> None:
    ledger.record(group("g1", [0.0, 1.0], served=1, step=None))
    ledger.apply_log("run", [trained(1, "g1", step=4)])
    assert ledger.drain()
    assert ledger.curve() == [
        StepRow(4, 1, policy_mean=0.5, returned_best=1.0, without_signal=0),
    ]


def test_groups_that_wait_for_the_servers_word_are_found_oldest_first(ledger: Ledger) -> None:
    ledger.record(group("b", [None, 1.0], received_at=2.0, task_id="t"))
    ledger.record(group("a", [0.5, 0.0], received_at=1.0))
    ledger.record(group("c", state="pooled"))
    assert ledger.drain()
    assert ledger.scored_groups() == [
        ScoredGroup("a", None, "1+1?", [0.5, 0.0]),
        ScoredGroup("b", "t", "1+1?", [None, 1.0]),
    ]


def test_the_secret_of_task_keys_stays_with_the_file(path: Path, tmp_path: Path) -> None:
    first, again, other = (
        Ledger.open(file) for file in (path, path, tmp_path / "other" / "ledger.sqlite")
    )
    assert first.task_secret() == first.task_secret() == again.task_secret()
    assert len(first.task_secret()) == 32 and other.task_secret() != first.task_secret()
    for one in (first, again, other):
        one.close()
