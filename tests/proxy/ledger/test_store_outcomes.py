"""The later states of a group, from its settlement and the server's log, and the reward curve."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

from fakevllm.ledger.records import ScoredGroup, StepRow
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import (
    call,
    dropped,
    group,
    marks,
    restored,
    rows,
    state,
    trained,
)

HOOKS = ("9f86d081884c7d65",)
"""Digest of the hooks of the groups that `group` returns."""


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
    ledger.settle("unknown", "pooled", None, 1, [[call()]])
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


def test_a_late_settlement_does_not_undo_a_state_from_the_run_log(
    ledger: Ledger, path: Path
) -> None:
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


def test_groups_that_a_crash_undid_are_lost(ledger: Ledger) -> None:
    ledger.record(group())
    ledger.apply_log("run", [trained(1, "g1")])
    ledger.apply_log("run", [trained(1, "g1"), restored(5, "g1")])
    assert state(ledger) == ("lost", "server_crashed")
    assert marks(ledger) == [False, False]
    found = ledger.group("g1")
    assert found is not None and (found.trained_step, found.trained_version) == (None, None)


def test_the_curve_says_where_the_hooks_and_the_job_changed(ledger: Ledger) -> None:
    sources = [(None, ""), ("a", ""), ("a", "j"), ("b", "j"), ("b", "k"), (None, "k")]
    for step, (hooks, job) in enumerate(sources, 1):
        ledger.record(replace(group(f"g{step}", [0.0, 1.0], served=1), hook_hash=hooks))
        ledger.settle(f"g{step}", "pooled", None, step, [], "run", job)
    assert ledger.drain()
    curve = ledger.curve("run")
    assert [row.changed for row in curve] == [
        *("", "", ""),
        "the hooks changed",
        "the job changed",
        "",
    ]
    assert (curve[3].hooks, curve[3].jobs, curve[0].hooks) == (("b",), ("j",), ())


def test_groups_of_an_abandoned_step_have_the_reason(ledger: Ledger) -> None:
    ledger.record(group())
    back = restored(5, "g1").model_copy(update={"reason": "gone_back"})
    ledger.apply_log("run", [trained(1, "g1"), back])
    assert state(ledger) == ("lost", "gone_back")


def test_a_group_that_will_be_trained_again_is_waiting_until_then(ledger: Ledger) -> None:
    for number, group_id in enumerate(("g1", "g2"), start=1):
        ledger.record(group(group_id))
        ledger.apply_log("run", [trained(number, group_id, step=number)])
        ledger.settle(group_id, "pooled", None, number, [[call()]], "run")
    ledger.apply_log("run", [restored(3).model_copy(update={"step": 1})])
    assert (state(ledger, "g1"), state(ledger, "g2")) == (("trained", None), ("pooled", None))
    assert (marks(ledger), marks(ledger, "g2")) == ([True, True], [False, False])
    ledger.apply_log("run", [trained(4, "g2", step=2)])
    assert state(ledger, "g2") == ("trained", None)


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
    assert ledger.curve("") == [
        StepRow(1, 2, policy_mean=0.5, returned_best=0.75, without_signal=1, hooks=HOOKS),
        StepRow(2, 1, policy_mean=0.375, returned_best=0.5, without_signal=0, hooks=HOOKS),
        StepRow(3, 1, policy_mean=0.75, returned_best=None, without_signal=1, hooks=HOOKS),
    ]


def test_the_curve_separates_the_rewards_of_sampled_and_greedy_siblings(
    ledger: Ledger,
) -> None:
    ledger.record(replace(group("a", [0.0, 1.0], served=1, step=1), served_by="best"))
    ledger.record(replace(group("b", [0.25, 1.0], served=0, step=1), served_by="random"))
    ledger.record(replace(group("c", [0.75, 0.0, 1.0], served=0, step=2), served_by="greedy"))
    assert ledger.drain()
    one, two = ledger.curve("")
    assert (one.policy_mean, one.returned_best, one.returned_random) == (0.5625, 1.0, 0.25)
    assert (two.policy_mean, two.returned_best, two.returned_random) == (0.5, 0.75, None)


def test_a_trained_group_whose_settlement_was_interrupted_is_on_the_curve(ledger: Ledger) -> None:
    ledger.record(group("g1", [0.0, 1.0], served=1, step=None))
    ledger.apply_log("run", [trained(1, "g1", step=4)])
    assert ledger.drain()
    assert ledger.runs() == ["run"]
    assert ledger.curve("run") == [
        StepRow(4, 1, policy_mean=0.5, returned_best=1.0, without_signal=0, hooks=HOOKS),
    ]


def test_each_run_has_its_own_curve_and_the_newest_is_first(ledger: Ledger) -> None:
    ledger.record(group("old", [0.0, 1.0], served=1, step=1, received_at=1.0))
    for at, name in enumerate(("first", "second"), 2):
        ledger.record(group(name, [0.5, float(at)], served=0, received_at=float(at)))
        ledger.settle(name, "pooled", None, 1, [], name)
    assert ledger.drain()
    assert ledger.runs() == ["second", "first", ""]
    means = [row.policy_mean for run_id in ledger.runs() for row in ledger.curve(run_id)]
    assert means == [1.75, 1.25, 0.5]


def test_groups_that_wait_for_the_server_are_listed_oldest_first(ledger: Ledger) -> None:
    second = group("b", [None, 1.0], received_at=2.0, task_id="t", served=1)
    ledger.record(replace(second, parent_id="a"))
    ledger.record(group("a", [0.5, 0.0], received_at=1.0))
    ledger.record(group("c", state="pooled"))
    assert ledger.drain()
    assert ledger.scored_groups() == [
        ScoredGroup("a", None, [0.5, 0.0], 0, hook_hash=HOOKS[0]),
        ScoredGroup("b", "t", [None, 1.0], 1, "a", HOOKS[0]),
    ]
