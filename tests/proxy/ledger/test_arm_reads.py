"""The scored groups of each arm are read from the ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.release.arm_gains import GroupOutcome
from fakevllm.release.arms import Arm
from tests.proxy.ledger.ledger_cases import group


def in_session(record: GroupRecord, session_id: str, parent_id: str | None = None) -> GroupRecord:
    return replace(record, session_id=session_id, parent_session_id=parent_id)


def with_arm(record: GroupRecord, arm: Arm) -> GroupRecord:
    return replace(record, arm=arm.value, arm_propensity=0.5)


def test_the_salt_stays_and_differs_from_ledger_to_ledger(tmp_path: Path) -> None:
    salts = list[bytes]()
    for name in ("a", "a", "b"):
        ledger = Ledger.open(tmp_path / name)
        salts += [ledger.arm_salt(), ledger.arm_salt()]
        assert ledger.arm_salt() != ledger.task_secret()
        ledger.close()
    assert len(set(salts[:4])) == 1 and salts[4] != salts[0]


def test_scored_groups_of_assigned_sessions_are_read_in_their_order_with_their_root(
    tmp_path: Path,
) -> None:
    ledger = Ledger.open(tmp_path / "ledger")
    late = with_arm(group("late", [0.0, 1.0, 0.5], served=1, received_at=9.0), Arm.TRAINING)
    ledger.record(in_session(late, "child", "root"))
    first = with_arm(group("first", [0.25, 0.75], received_at=1.0), Arm.BASELINE)
    ledger.record(in_session(first, "grandchild", "child"))
    ledger.record(with_arm(group("alone", [1.0, None, 0.0], received_at=2.0), Arm.RELEASED))
    greedy = with_arm(group("greedy", [1.0, 0.0], received_at=3.0), Arm.TRAINING)
    ledger.record(replace(greedy, served_by="greedy"))
    ledger.record(with_arm(group("one reward", [1.0, None]), Arm.TRAINING))
    ledger.record(replace(group("unavailable"), arm="training"))
    ledger.record(group("no arm"))
    assert ledger.drain()
    newest = ledger.arms.newest_row()
    ledger.record(with_arm(group("later"), Arm.TRAINING))
    assert ledger.drain()
    assert list(ledger.arms.outcomes(newest)) == [
        GroupOutcome("root", Arm.BASELINE, 1.0, 0.5, 0.25, 0.25, 0.75),
        GroupOutcome("alone", Arm.RELEASED, 2.0, 0.5, 1.0, 0.0, 1.0),
        GroupOutcome("greedy", Arm.TRAINING, 3.0, 0.0, 1.0, 0.0, 1.0),
        GroupOutcome("root", Arm.TRAINING, 9.0, 0.5, 1.0, 0.0, 1.0),
    ]
    ledger.close()


def test_a_session_without_scored_groups_still_leads_to_the_root(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger")
    scored = with_arm(group("scored", received_at=1.0), Arm.TRAINING)
    ledger.record(in_session(scored, "child", "parent"))
    unscored = with_arm(group("unscored", [None, None], received_at=2.0), Arm.TRAINING)
    ledger.record(in_session(unscored, "parent", "root"))
    assert ledger.drain()
    assert [one.root for one in ledger.arms.outcomes(ledger.arms.newest_row())] == ["root"]
    ledger.close()


def test_a_cycle_of_sessions_ends(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger")
    for name, parent_id in (("a", "b"), ("b", "a")):
        ledger.record(in_session(with_arm(group(name), Arm.TRAINING), name, parent_id))
    assert ledger.drain()
    roots = {one.root for one in ledger.arms.outcomes(ledger.arms.newest_row())}
    assert roots <= {"a", "b"}
    ledger.close()
