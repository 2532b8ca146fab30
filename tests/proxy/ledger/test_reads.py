"""Reads of a group's tokens and advantages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import call, dropped, group, restored, trained


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def put(ledger: Ledger, name: str, received_at: float = 1000.0) -> None:
    ledger.record(group(name, received_at=received_at))
    ledger.settle(name, "pooled", None, 1, [[call()], [call(version=5), call()]], "run")


def advantages(ledger: Ledger, name: str = "g1") -> list[float | None]:
    assert ledger.drain()
    found = ledger.group(name)
    assert found is not None
    return [one.advantage for one in found.siblings]


def test_calls_are_returned_by_sibling_in_the_captured_order(ledger: Ledger) -> None:
    put(ledger, "g1")
    assert ledger.drain()
    found = ledger.calls.by_sibling("g1")
    assert found == {
        0: [call().model_copy(update={"shaped": False})],
        1: [call(version=5), call()],
    }
    assert ledger.calls.by_sibling("other") == {}


def test_a_call_keeps_the_name_of_its_replica(ledger: Ledger) -> None:
    ledger.record(group())
    calls = [[call(replica="replica-1")], [call()]]
    ledger.settle("g1", "pooled", None, 1, calls)
    assert ledger.drain()
    assert ledger.calls.by_sibling("g1") == dict(enumerate(calls))
    assert [one.replica for one in ledger.calls.versions("g1")] == ["replica-1", None]


def test_a_group_is_found_by_the_beginning_of_its_id(ledger: Ledger) -> None:
    for name in ("ab", "abc", "b%"):
        put(ledger, name)
    assert ledger.drain()
    assert ledger.calls.group_ids("abc") == ["abc"]
    assert ledger.calls.group_ids("ab")[0] == "ab"
    assert len(ledger.calls.group_ids("a")) == 2
    assert ledger.calls.group_ids("b%") == ["b%"]
    assert ledger.calls.group_ids("%") == []


def test_the_latest_group_is_the_newest_trained_one_or_else_the_newest_with_tokens(
    ledger: Ledger,
) -> None:
    assert ledger.calls.latest_group_id() is None
    ledger.record(group("bare", received_at=9000.0))
    put(ledger, "old", 1000.0)
    put(ledger, "new", 2000.0)
    assert ledger.drain()
    assert ledger.calls.latest_group_id() == "new"
    ledger.apply_log("run", [trained(1, "old")])
    assert ledger.drain()
    assert ledger.calls.latest_group_id() == "old"


def test_the_advantage_is_that_of_the_step_that_trained_the_group(ledger: Ledger) -> None:
    put(ledger, "g1")
    ledger.apply_log("run", [trained(1, "g1", siblings=[1], advantages=[-0.5])])
    assert advantages(ledger) == [None, -0.5]
    ledger.apply_log("run", [trained(2, "g1", advantages=[0.25, -0.25])])
    assert advantages(ledger) == [0.25, -0.25]


def test_advantages_are_unknown_if_the_server_does_not_report_them(ledger: Ledger) -> None:
    put(ledger, "g1")
    ledger.apply_log("run", [trained(1, "g1")])
    assert advantages(ledger) == [None, None]


def test_a_group_that_was_lost_or_dropped_has_no_advantage(ledger: Ledger) -> None:
    for name in ("g1", "g2", "g3"):
        put(ledger, name)
    step = trained(1, "g1", "g2", "g3", step=2, advantages=[0.5, -0.5])
    undone = restored(3, "g2").model_copy(update={"step": 1})
    ledger.apply_log("run", [step, dropped(2, g1="stale"), undone])
    assert [advantages(ledger, name) for name in ("g1", "g2", "g3")] == [[None, None]] * 3
