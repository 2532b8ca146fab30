"""The ledger stores records and reads them back."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakevllm.ledger.records import (
    EVAL_KIND,
    EvaluatedRewards,
    GroupRecord,
    SiblingRecord,
)
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.ledger.ledger_cases import (
    group,
    rows,
    sibling,
)

USER = {"role": "user", "content": "1+1?"}
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


def test_a_group_that_is_recorded_twice_is_stored_once(ledger: Ledger, path: Path) -> None:
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


def test_hooks_get_the_latest_group_with_two_answers(ledger: Ledger) -> None:
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


def test_hooks_never_get_a_row_of_an_evaluation_as_the_latest_group(ledger: Ledger) -> None:
    ledger.record(group("app", received_at=1.0))
    ledger.record(replace(group("row", state="served", received_at=2.0), kind=EVAL_KIND))
    assert ledger.drain()
    latest = ledger.latest_group()
    assert latest is not None and latest.request_id == "app"


def test_the_rows_of_an_evaluation_are_read_in_the_order_in_which_they_were_requested(
    ledger: Ledger,
) -> None:
    def row(group_id: str, at: float, rewards: list[float | None], **changes: Any) -> None:
        record = group(group_id, rewards, state="served", received_at=at, task_id="row-1")
        values = {
            "kind": EVAL_KIND,
            "eval_id": "gate-20-run",
            "eval_version": 20,
            "hook_hash": "now",
        }
        ledger.record(replace(record, **{**values, **changes}))

    row("later", 3.0, [1.0, 0.25, 0.5])
    row("earlier", 2.0, [1.0, None, 0.75], eval_version=0)
    row("without a reward", 4.0, [None, None, None], task_id="row-2")
    row("of another evaluation", 1.0, [1.0, 1.0], eval_id="gate-40-run")
    row("of changed weights", 1.0, [1.0, 1.0], eval_version=None)
    row("of another hook", 1.0, [1.0, 1.0], hook_hash="before")
    row("of no hook", 5.0, [None, None], task_id="row-3", hook_hash=None)
    assert ledger.drain()
    assert ledger.evaluated_rows("gate-20-run", "now") == [
        EvaluatedRewards(0, "row-1", [0.75]),
        EvaluatedRewards(20, "row-1", [0.25, 0.5]),
        EvaluatedRewards(20, "row-2", []),
        EvaluatedRewards(20, "row-3", []),
    ]


def test_tasks_are_put_once_and_read_back(ledger: Ledger) -> None:
    first = Task(task_id="t1", main_query="1+1?", metadata={"answer": "2"})
    ledger.put_tasks([first, Task(task_id="t2")])
    ledger.put_tasks([first.model_copy(update={"metadata": {"answer": "two"}})], "0123abcd")
    assert ledger.drain()
    stored = {one.task.task_id: (one.task.metadata, one.owner) for one in ledger.tasks()}
    assert stored == {"t1": ({"answer": "two"}, "0123abcd"), "t2": ({}, None)}


async def test_flush_waits_without_blocking_the_loop(ledger: Ledger) -> None:
    ledger.record(group())
    assert await asyncio.wait_for(ledger.flush(), 10)
    assert ledger.counts() == {"scored": 1}


def test_another_process_reads_while_the_ledger_is_open(ledger: Ledger, path: Path) -> None:
    ledger.record(group())
    assert ledger.drain()
    program = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2]))"
    query = 'SELECT "index", reward FROM siblings'
    read = subprocess.run(
        [sys.executable, "-c", program, path, query], capture_output=True, text=True, timeout=30
    )
    assert read.stdout == "(0, 0.0) (1, 1.0)\n"


def test_the_queries_of_the_readme_run(ledger: Ledger, path: Path) -> None:
    ledger.record(group("a", [0.0, 1.0], served=1, step=1))
    placed = {"kind": "regenerates", "evidence": "prefix"}
    ledger.record(replace(group("b", state="dropped"), reason="hook_nan", **placed))
    assert ledger.drain()
    readme = (Path(__file__).parents[3] / "fakevllm" / "ledger" / "README.md").read_text()
    indented = [line for line in readme.splitlines() if line.startswith("    ")]
    why, learning, again, least, tokens = " ".join(indented).split(";")[:5]
    assert sorted(rows(path, why)) == [("dropped", "hook_nan", 1), ("scored", None, 1)]
    assert rows(path, learning) == [(1, 0.5, 1.0)]
    assert rows(path, tokens) == [("", 6, 3, 0)]
    assert rows(path, again) == [("1+1?", "regenerates", "prefix")]
    assert len(rows(path, least)) == 4


def test_the_secret_of_task_keys_stays_with_the_file(path: Path, tmp_path: Path) -> None:
    first, again, other = (
        Ledger.open(file) for file in (path, path, tmp_path / "other" / "ledger.sqlite")
    )
    assert first.task_secret() == first.task_secret() == again.task_secret()
    assert len(first.task_secret()) == 32 and other.task_secret() != first.task_secret()
    for one in (first, again, other):
        one.close()


ASKED: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    (
        "/v1/messages",
        {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": [USER]},
        [{"role": "system", "content": "Be brief."}, USER],
    ),
    (
        "/v1/responses",
        {"model": "m", "instructions": "Be brief.", "input": "1+1?"},
        [{"role": "system", "content": "Be brief."}, USER],
    ),
    ("/v1/chat/completions", {"model": "m", "messages": [USER]}, [USER]),
    ("/v1/completions", {"model": "m", "prompt": "Once"}, []),
    ("/v1/responses", {"model": "m", "input": "1+1?", "background": True}, []),
    ("/v1/of_another_version", {"model": "m", "messages": [USER]}, []),
]


@pytest.mark.parametrize(("route", "body", "messages"), ASKED)
def test_hooks_get_a_recorded_conversation_as_it_was_sent_upstream(
    ledger: Ledger, route: str, body: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    request_json = orjson.dumps(body).decode()
    ledger.record(replace(group("g"), route=route, request_json=request_json))
    assert ledger.drain()
    latest = ledger.latest_group()
    assert latest is not None and latest.siblings()[1].messages == messages


def test_hooks_get_the_conversation_before_a_recorded_request(ledger: Ledger) -> None:
    first = {"model": "m", "input": "1+1?"}
    then = {"model": "m", "input": "Sure?", "previous_response_id": "resp_1"}
    for number, body in enumerate((first, then), start=1):
        record = replace(
            group(f"g{number}", received_at=float(number)),
            route="/v1/responses",
            response_id=f"resp_{number}",
            request_json=orjson.dumps(body).decode(),
        )
        ledger.record(record)
    assert ledger.drain()
    latest = ledger.latest_group()
    assert latest is not None and [one["content"] for one in latest.messages] == [
        "1+1?",
        "answer 0",
        "Sure?",
    ]
