"""Checks of a finished demo whose processes were killed: its ledger, its server's journal, and the
requests of an app that ran beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo_parts.concurrent_app import AppRequest
from benchmarks.demo_parts.process_kills import CompletedKill, Victim
from benchmarks.ledger_checks import (
    Finding,
    check_file,
    check_states,
    check_trained_once,
    read_rows,
)
from benchmarks.run_log_reader import read_log_entries

Json = dict[str, Any]

LEDGER_DELAY_S = 0.5
"""Longest time between an answer and its row in the ledger. It is usually some 10 ms, and more on a
busy machine. A kill of the proxy within this time may lose the row."""
LEDGER_STATES = {"consumed": "trained", "dropped": "dropped"}
"""Maps the state of a group in the server's journal to the group's state in the proxy's ledger."""
UNSCORED = "aborted"
"""Reason in the journal for dropping a group that the proxy never scored. For such a group, the
ledger has another reason, or no row if the proxy was killed."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """State of one group in the journal or in the ledger."""

    state: str
    reason: str | None


def check_demo(
    run_dir: Path, kills: Sequence[CompletedKill], requests: Sequence[AppRequest]
) -> list[Finding]:
    """Check one finished run in `run_dir`."""
    ledger = run_dir / "ledger.sqlite"
    groups = read_rows(ledger, "select group_id, task_id, state, reason from groups")
    return [
        *check_one_group_each(groups, kills, requests),
        check_errors(kills, requests),
        check_file(ledger),
        *check_states(groups),
        *check_trained_once(read_log_entries(run_dir), groups),
        *check_acknowledged(*_read_journal(run_dir), _by_id(groups)),
    ]


def check_acknowledged(
    acknowledged: Sequence[str],
    journal: Mapping[str, GroupRow],
    ledger: Mapping[str, GroupRow],
) -> list[Finding]:
    """Check that acknowledged groups have ended, and that journal and ledger agree on all groups.

    `acknowledged` are the ids of the groups whose end the server has acknowledged.
    """
    without_end = [
        group_id
        for group_id in acknowledged
        if (row := journal.get(group_id)) is None
        or not (row.state == "consumed" or (row.state == "dropped" and row.reason))
    ]
    different = [
        group_id
        for group_id in sorted({*acknowledged, *journal})
        if not _agree(journal.get(group_id), ledger.get(group_id))
    ]
    unknown = [
        group_id
        for group_id, row in ledger.items()
        if row.state == "trained" and group_id not in journal
    ]
    return [
        Finding(
            "every acknowledged group was trained, or dropped with a reason",
            f"{len(acknowledged)} groups acknowledged, without an end {without_end[:5]}",
            bool(acknowledged) and not without_end,
        ),
        Finding(
            "journal and ledger agree on each group",
            f"{len(journal)} in the journal, {len(ledger)} in the ledger, different "
            f"{[*different, *unknown][:5]}",
            not different and not unknown,
        ),
    ]


def _agree(journal: GroupRow | None, ledger: GroupRow | None) -> bool:
    if journal is not None and journal.reason == UNSCORED:
        return ledger is None or ledger.state in ("dropped", "failed")
    if journal is None or ledger is None:
        return False
    return LEDGER_STATES.get(journal.state) == ledger.state and (
        ledger.state == "trained" or journal.reason == ledger.reason
    )


def check_one_group_each(
    groups: Sequence[Json], kills: Sequence[CompletedKill], requests: Sequence[AppRequest]
) -> list[Finding]:
    """Check that every answered request has exactly one group.

    Groups in state `failed` do not count: the app got no answer from them and sent the request
    again. After a kill of the proxy, two exceptions are allowed. A request has no group if its
    answer was sent just before the kill. A request has a second group if the kill cut off its first
    answer.
    """
    counts = Counter(group["task_id"] for group in groups if group["state"] != "failed")
    answered = [request for request in requests if request.answered_at is not None]
    without_group = [request for request in answered if counts[request.name] == 0]
    with_several = [request for request in answered if counts[request.name] > 1]
    unwritten = [one for one in without_group if _was_answered_just_before_kill(kills, one)]
    broken_off = [one for one in with_several if _was_open_at_kill(kills, one)]
    unexplained = [
        request.name
        for request in (*without_group, *with_several)
        if request not in unwritten and request not in broken_off
    ]
    return [
        Finding(
            "every answered request has one group",
            f"{len(answered)} answered of {len(requests)}, otherwise {unexplained[:5]}",
            bool(answered) and not unexplained,
        ),
        Finding(
            "exceptions because the proxy was killed",
            f"{len(unwritten)} rows not written yet, {len(broken_off)} with a second group",
            None,
        ),
    ]


def check_errors(kills: Sequence[CompletedKill], requests: Sequence[AppRequest]) -> Finding:
    """Check that the app got no error after its client's retries. The only allowed errors are those
    of requests during which the proxy was killed."""
    answered = [request for request in requests if request.answered_at is not None]
    unexplained = [one for one in answered if one.errors and not _was_open_at_kill(kills, one)]
    num_explained = sum(len(one.errors) for one in answered if one not in unexplained)
    slowest = max(
        (one.answered_at - one.started_at for one in answered if one.answered_at), default=0.0
    )
    shown = "; ".join(f"{one.name}: {one.errors[0]}" for one in unexplained[:3])
    return Finding(
        "no error reached the app except through a killed proxy",
        f"{len(unexplained)} {shown}; {num_explained} through a killed proxy; slowest answer "
        f"{slowest:.0f} s",
        not unexplained,
    )


def _was_open_at_kill(kills: Sequence[CompletedKill], request: AppRequest) -> bool:
    """Return whether the proxy was killed between the request's start and its answer."""
    end = request.answered_at or float("inf")
    return any(
        kill.victim is Victim.PROXY and request.started_at <= kill.at <= end for kill in kills
    )


def _was_answered_just_before_kill(kills: Sequence[CompletedKill], request: AppRequest) -> bool:
    """Return whether the proxy was killed within LEDGER_DELAY_S after the answer."""
    return request.answered_at is not None and any(
        kill.victim is Victim.PROXY and 0 <= kill.at - request.answered_at <= LEDGER_DELAY_S
        for kill in kills
    )


def _read_journal(run_dir: Path) -> tuple[list[str], dict[str, GroupRow]]:
    """Return the ids of the acknowledged groups, and all groups of the journal by id."""
    file = run_dir / "journal.sqlite"
    groups = read_rows(file, "select group_id, state, reason from groups")
    submissions = read_rows(file, 'select "key", reply_json from submissions')
    acknowledged = [
        row["key"].removeprefix("group:")
        for row in submissions
        if row["key"].startswith("group:") and '"success":true' in row["reply_json"]
    ]
    return acknowledged, _by_id(groups)


def _by_id(groups: Sequence[Json]) -> dict[str, GroupRow]:
    return {group["group_id"]: GroupRow(group["state"], group["reason"]) for group in groups}
