"""The counters equal a recount of the rows, whatever was written."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from fakevllm.ledger.curve_reads import MIN_END_GROUPS
from fakevllm.ledger.learning_costs import TokenCosts
from fakevllm.ledger.migrations import MIGRATIONS, fill_counters, fill_token_counters
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.records import EVAL_KIND, FeedbackRecord, FeedbackState, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.status_rows import status_rows
from fakevllm_runtime.migrations import migrate
from tests.proxy.ledger.ledger_cases import dropped, group, restored, trained

TABLES = (
    "counters",
    "step_counters",
    "step_tokens",
    "step_digests",
    "run_digests",
    "run_counters",
    "session_counters",
)
IDS = ("g0", "g1", "g2", "g3")
RUNS = ("ra", "rb")
Change = Callable[[Ledger], object]

REASONS = st.sampled_from([None, "stale", "upstream_500: detail", "upstream_500: other"])
TOKENS = st.sampled_from([None, 0, 3, 7])
REWARDS = st.lists(st.sampled_from([None, -1.0, 0.0, 0.5, 2.0]), max_size=3)


@st.composite
def records(draw: st.DrawFn) -> GroupRecord:
    rewards = draw(REWARDS)
    record = group(
        draw(st.sampled_from(IDS)),
        rewards,
        served=draw(st.integers(0, 2)),
        state=draw(st.sampled_from(["scored", "served", "failed"])),
        step=draw(st.sampled_from([None, 1, 2])),
        received_at=draw(st.sampled_from([1.0, 2.0, 3.0])),
    )
    failures = [draw(st.sampled_from([None, "empty", "cut_off"])) for _ in rewards]
    siblings = [
        replace(sibling, failure=failure, completion_tokens=draw(TOKENS))
        for sibling, failure in zip(record.siblings, failures, strict=True)
    ]
    return replace(
        record,
        siblings=siblings,
        reason=draw(REASONS),
        served_by=draw(st.sampled_from([None, "best", "random", "greedy"])),
        hook_hash=draw(st.sampled_from([None, "h1", "h2"])),
        session_id=draw(st.sampled_from([None, "s1", "s2"])),
        parent_session_id=draw(st.sampled_from([None, "s0"])),
        kind=draw(st.sampled_from(["new", "side"])),
        turn=draw(st.integers(1, 3)),
    )


@st.composite
def settlements(draw: st.DrawFn) -> Change:
    name, run_id = draw(st.sampled_from(IDS)), draw(st.sampled_from([None, *RUNS]))
    state, reason, step = draw(st.sampled_from(["pooled", "dropped"])), draw(REASONS), 2
    job_hash = draw(st.sampled_from([None, "j1", "j2"]))
    return lambda ledger: ledger.settle(name, state, reason, step, [], run_id, job_hash)


@st.composite
def log_entries(draw: st.DrawFn) -> Change:
    names = draw(st.lists(st.sampled_from(IDS), min_size=1, unique=True))
    run_id, seq, step = (
        draw(st.sampled_from(RUNS)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 3)),
    )
    entry = draw(
        st.sampled_from(
            [
                trained(seq, *names, step=step),
                dropped(seq, **dict.fromkeys(names, "stale: by 3")),
                restored(seq, *names).model_copy(update={"step": step}),
            ]
        )
    )
    return lambda ledger: ledger.apply_log(run_id, [entry])


@st.composite
def feedback_changes(draw: st.DrawFn) -> Change:
    row = FeedbackRecord(
        group_id=draw(st.sampled_from(IDS)),
        feedback_id=draw(st.sampled_from("ab")),
        received_at=1.0,
    )
    state = draw(st.sampled_from(FeedbackState))
    return draw(
        st.sampled_from(
            [
                lambda ledger: ledger.feedback.record(row),
                lambda ledger: ledger.feedback.set_outcome(row, state),
                lambda ledger: ledger.feedback.void(row, "taken_back"),
            ]
        )
    )


def recorded(record: GroupRecord) -> Change:
    return lambda ledger: ledger.record(record)


CHANGES = st.lists(
    st.one_of(records().map(recorded), settlements(), log_entries(), feedback_changes()),
    max_size=20,
)


def contents(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of the counters. Numbers that are 0 are left out."""
    with closing(sqlite3.connect(path)) as db:
        found = {name: sorted(db.execute(f"SELECT * FROM {name}"), key=repr) for name in TABLES}
    found["counters"] = [row for row in found["counters"] if row[2] != 0]
    return found


def recount(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as db:
        for name in TABLES:
            db.exec_driver_sql(f"DELETE FROM {name}")
        fill_counters(db)
        fill_token_counters(db)
    engine.dispose()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in TABLES:
        assert len(found[name]) == len(expected[name]), (name, found[name], expected[name])
        for row, expected_row in zip(found[name], expected[name], strict=True):
            assert row == pytest.approx(expected_row), name


@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, max_size=4))
def test_the_counters_equal_a_recount_after_any_changes(batches: Sequence[list[Change]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = Ledger.open(path)
        try:
            for batch in batches:
                for change in batch:
                    change(ledger)
                assert ledger.drain()
            assert ledger.health.dropped == 0
        finally:
            ledger.close()
        found = contents(path)
        recount(path)
        assert_same(found, contents(path))


def test_a_change_that_cannot_be_written_does_not_count(ledger: Ledger, path: Path) -> None:
    broken: Any = replace(group("g1"), question=object())
    ledger.record(group("g0", served=1))
    ledger.record(broken)
    ledger.record(group("g2", state="served"))
    assert ledger.drain() and ledger.health.dropped == 1
    assert ledger.counts() == {"scored": 1, "served": 1}
    assert ledger.sampled_tokens() == 12


def test_tokens_of_evaluations_are_not_counted_with_those_of_apps(ledger: Ledger) -> None:
    ledger.record(group("app"))
    ledger.record(replace(group("row", state="served"), kind=EVAL_KIND))
    assert ledger.drain()
    assert ledger.sampled_tokens() == 6


def test_a_ledger_from_before_the_counters_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    old = [step for step in MIGRATIONS if step.__name__ < "m012"]
    with engine.begin() as db:
        migrate(db, old, "the file")
        insert = (
            "INSERT INTO groups (group_id, received_at, route, model, streamed, request_json, "
            "question, num_siblings, status, latency_s, state, step, run_id, session_id, turn) "
            "VALUES (?, ?, '', '', 0, '{}', 'hello', 2, 200, 1.0, 'pooled', 3, 'r', 's', 1)"
        )
        db.exec_driver_sql(insert, [("g1", 1.0), ("g2", 2.0)])
        siblings = (
            'INSERT INTO siblings (group_id, "index", served, best, status, reward, trained, '
            "completion_tokens) VALUES (?, ?, ?, 0, 200, ?, 0, 5)"
        )
        rows = [("g1", 0, 1, 1.0), ("g1", 1, 0, 0.0), ("g2", 0, 1, 0.5), ("g2", 1, 0, 0.5)]
        db.exec_driver_sql(siblings, rows)
    engine.dispose()
    for _ in range(2):
        ledger = Ledger.open(path)
        (row,) = ledger.curve("r")
        assert (row.step, row.groups, row.policy_mean, row.returned_best) == (3, 2, 0.5, 0.75)
        assert row.without_signal == 1 and ledger.runs() == ["r"]
        assert ledger.counts() == {"pooled": 2} and ledger.sampled_tokens() == 20
        costs = ReadOnlyLedger(path).summary.costs("r")
        assert costs.run_tokens == costs.all_tokens == TokenCosts(sampled=20, served=10)
        (session,) = ledger.sessions.latest(5)
        assert (session.num_groups, session.reward, session.question) == (2, 0.75, "hello")
        ledger.close()


def stats_of(ledger: Ledger, *, ends_only: bool) -> dict[str, Any]:
    stats: dict[str, Any] = {"engine": None, "counts": {}, "untrained": {}, "paused": False}
    stats |= {"run_id": "r", "other_runs": [], "ledger_dropped": 0, "ledger_error": None}
    if not ends_only:
        return stats | {"curve": [_json(row) for row in ledger.curve("r")]}
    ends = ledger.curve_ends("r")
    stats |= {"curve_before": ends.num_before, "curve_between": ends.num_between}
    return stats | {"curve": [_json(row) for row in ends.steps]}


def _json(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


@pytest.mark.parametrize("change_at", [None, 0, 30, 199])
def test_the_ends_of_a_curve_show_the_status_of_the_whole_curve(
    ledger: Ledger, change_at: int | None
) -> None:
    num_steps = 200
    for step in range(num_steps):
        record = group(f"g{step}", [0.0, math.sin(step)], served=1, step=step, state="pooled")
        is_changed = change_at is not None and step >= change_at
        record = replace(record, hook_hash="new" if is_changed else "old", run_id="r")
        ledger.record(record)
    assert ledger.drain() and ledger.health.dropped == 0
    ends = ledger.curve_ends("r")
    assert len(ends.steps) <= 2 * MIN_END_GROUPS
    assert ends.num_before + len(ends.steps) + ends.num_between == num_steps
    shown = list(status_rows(stats_of(ledger, ends_only=True)))
    assert shown == list(status_rows(stats_of(ledger, ends_only=False)))
    assert ("curve" in dict(shown)) is (change_at in (30, 199))
