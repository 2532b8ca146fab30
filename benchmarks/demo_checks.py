"""What must hold after a demo whose processes were killed: of its ledger, of its server's journal,
and of an app that asked beside it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo_app import Asked
from benchmarks.kills import Killed, Victim
from benchmarks.mixed_checks import Finding, check_file, check_states, check_trained_once
from benchmarks.run_logs import entries_of

Json = dict[str, Any]

JUST_ANSWERED_S = 0.5
"""Before a kill of the proxy: a row of the ledger is written some 10 ms behind its answer, and on a
busy machine a little later."""
ENDS = {"consumed": "trained", "dropped": "dropped"}
"""How the ledger calls what the journal tells of a group."""
UNSCORED = "aborted"
"""Why a group is dropped that its proxy never scored: the ledger has a reason of its own, or no row
where the proxy was killed."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of a group, in one of the files."""

    state: str
    reason: str | None


def check_demo(run_dir: Path, kills: Sequence[Killed], asked: Sequence[Asked]) -> list[Finding]:
    ledger = run_dir / "ledger.sqlite"
    groups = _rows(ledger, "select group_id, task_id, state, reason from groups")
    return [
        *check_one_group_each(groups, kills, asked),
        check_errors(kills, asked),
        check_file(ledger),
        *check_states(groups),
        *check_trained_once(entries_of(run_dir), groups),
        *check_acknowledged(*_journal(run_dir), _by_id(groups)),
    ]


def check_acknowledged(
    acknowledged: Sequence[str], journal: Mapping[str, Row], ledger: Mapping[str, Row]
) -> list[Finding]:
    """`acknowledged`: groups whose end the server has said yes to."""
    open_ends = [
        group_id
        for group_id in acknowledged
        if (row := journal.get(group_id)) is None
        or not (row.state == "consumed" or (row.state == "dropped" and row.reason))
    ]
    unlike = [
        group_id
        for group_id in sorted({*acknowledged, *journal})
        if not _is_alike(journal.get(group_id), ledger.get(group_id))
    ]
    unknown = [
        group_id
        for group_id, row in ledger.items()
        if row.state == "trained" and group_id not in journal
    ]
    return [
        Finding(
            "what was acknowledged was trained, or dropped with a reason",
            f"{len(acknowledged)} groups acknowledged, without an end {open_ends[:5]}",
            bool(acknowledged) and not open_ends,
        ),
        Finding(
            "both files tell the same of each group",
            f"{len(journal)} in the journal, {len(ledger)} in the ledger, told otherwise "
            f"{[*unlike, *unknown][:5]}",
            not unlike and not unknown,
        ),
    ]


def _is_alike(journal: Row | None, ledger: Row | None) -> bool:
    if journal is not None and journal.reason == UNSCORED:
        return ledger is None or ledger.state in ("dropped", "failed")
    if journal is None or ledger is None:
        return False
    return ENDS.get(journal.state) == ledger.state and (
        ledger.state == "trained" or journal.reason == ledger.reason
    )


def check_one_group_each(
    groups: Sequence[Json], kills: Sequence[Killed], asked: Sequence[Asked]
) -> list[Finding]:
    """Groups that answered nobody (`failed`: asked anew) do not count. A kill of the proxy excuses
    the row of an answer that it had just given, and the second group of one that it broke off."""
    counts = Counter(group["task_id"] for group in groups if group["state"] != "failed")
    answered = [one for one in asked if one.ended is not None]
    none = [one for one in answered if counts[one.name] == 0]
    many = [one for one in answered if counts[one.name] > 1]
    unwritten = [one for one in none if _just_killed(kills, one)]
    broken = [one for one in many if _killed_amid(kills, one)]
    bare = [one.name for one in (*none, *many) if one not in unwritten and one not in broken]
    return [
        Finding(
            "every answered request has one group",
            f"{len(answered)} answered of {len(asked)}, otherwise {bare[:5]}",
            bool(answered) and not bare,
        ),
        Finding(
            "but for those of a killed proxy",
            f"{len(unwritten)} rows not written yet, {len(broken)} with a second group",
            None,
        ),
    ]


def check_errors(kills: Sequence[Killed], asked: Sequence[Asked]) -> Finding:
    """Behind the retries of the app's client."""
    ended = [one for one in asked if one.ended is not None]
    told = [one for one in ended if one.errors and not _killed_amid(kills, one)]
    blamed = sum(len(one.errors) for one in ended if one not in told)
    slowest = max((one.ended - one.began for one in ended if one.ended), default=0.0)
    said = "; ".join(f"{one.name}: {one.errors[0]}" for one in told[:3])
    return Finding(
        "no error reached the app but through a killed proxy",
        f"{len(told)} {said}; {blamed} through a killed proxy; slowest answer {slowest:.0f} s",
        not told,
    )


def _killed_amid(kills: Sequence[Killed], one: Asked) -> bool:
    ended = one.ended or float("inf")
    return any(kill.victim is Victim.PROXY and one.began <= kill.at <= ended for kill in kills)


def _just_killed(kills: Sequence[Killed], one: Asked) -> bool:
    return one.ended is not None and any(
        kill.victim is Victim.PROXY and 0 <= kill.at - one.ended <= JUST_ANSWERED_S
        for kill in kills
    )


def _journal(run_dir: Path) -> tuple[list[str], dict[str, Row]]:
    """What was acknowledged, and the groups."""
    file = run_dir / "journal.sqlite"
    groups = _rows(file, "select group_id, state, reason from groups")
    ended = _rows(file, 'select "key", reply_json from submissions')
    acknowledged = [
        row["key"].removeprefix("group:")
        for row in ended
        if row["key"].startswith("group:") and '"success":true' in row["reply_json"]
    ]
    return acknowledged, _by_id(groups)


def _by_id(groups: Sequence[Json]) -> dict[str, Row]:
    return {group["group_id"]: Row(group["state"], group["reason"]) for group in groups}


def _rows(file: Path, sql: str) -> list[Json]:
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(sql)]
