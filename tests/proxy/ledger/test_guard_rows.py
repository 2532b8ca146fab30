"""What the guard reads from the ledger, and its memory there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.guard.guard_service import held_out_means, measured_groups
from fakevllm.ledger.guard_rows import HeldOutRow
from fakevllm.ledger.records import EVAL_KIND, GroupRecord
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import group


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.sqlite")


def evaluated(number: int, version: int, *rewards: float, **fields: str) -> GroupRecord:
    record = group(f"e{number}", [0.0, *rewards], received_at=1000.0 + number)
    values = {"run_id": "run", "hook_hash": "h"} | fields
    return replace(record, kind=EVAL_KIND, eval_id="gate", eval_version=version, **values)


async def test_the_answers_of_groups_are_read_in_the_order_of_the_ids(ledger: Ledger) -> None:
    judged = group("g2", [1.0])
    notes = '{"judge":0.25,"other":"x"}'
    siblings = [replace(judged.siblings[0], annotations_json=notes, tool_calls_json="[]")]
    for record in (group("g1", [0.0, None]), replace(judged, siblings=siblings), group("g3")):
        ledger.record(record)
    assert await ledger.flush()
    answers = ledger.guard.answers(["g2", "g1", "unknown"])
    assert [(one.group_id, one.text) for one in answers] == [
        ("g2", "answer 0"),
        ("g1", "answer 0"),
        ("g1", "answer 1"),
    ]
    first, second = measured_groups(answers, "judge")
    assert (first.question, first.answers[0].second_score) == ("1+1?", 0.25)
    assert first.answers[0].has_tool_call
    assert [one.reward for one in second.answers] == [0.0, None]
    assert measured_groups(answers, "other")[0].answers[0].second_score is None
    assert measured_groups(answers, None)[0].answers[0].second_score is None
    ledger.close()


async def test_held_out_rows_are_those_of_the_run_without_greedy_samples(ledger: Ledger) -> None:
    for record in (
        evaluated(1, 0, 1.0, 0.0),
        evaluated(2, 20, 1.0),
        evaluated(3, 20, 1.0, run_id="other"),
        group("app"),
    ):
        ledger.record(record)
    assert await ledger.flush()
    assert ledger.guard.held_out("run") == [HeldOutRow(20, "h", 1.0), HeldOutRow(0, "h", 0.5)]
    ledger.close()


def test_the_mean_of_a_version_has_only_rows_that_the_present_hooks_scored() -> None:
    rows = [HeldOutRow(20, "h", value) for value in (0.0, 1.0, 1.0, 0.0)]
    rows += [HeldOutRow(20, "old", 0.0), HeldOutRow(0, "h", 1.0), HeldOutRow(0, "h", 1.0)]
    first, second = held_out_means(rows, ["h"])
    assert (first.version, first.mean, first.error, first.num_rows) == (0, 1.0, 0.0, 2)
    assert (second.version, second.mean, second.num_rows) == (20, 0.5, 4)
    assert second.error == pytest.approx(0.2887, abs=1e-4)
    assert held_out_means(rows, ["new"]) == []


async def test_the_memory_of_the_guard_is_replaced(ledger: Ledger) -> None:
    assert ledger.guard.state() is None
    for text in ("one", "two"):
        ledger.guard.put_state(text)
    assert await ledger.flush()
    assert ledger.guard.state() == "two"
    ledger.close()
