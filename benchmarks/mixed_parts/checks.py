"""Checks after the mixed traffic: the apps' requests, the ledger, the server's run log, and memory.

The checks that `demo_kills` needs as well are in `benchmarks.ledger_checks`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ledger_checks import Finding, read_rows
from benchmarks.mixed_parts.clients import AppError, ClientRequest

Json = dict[str, Any]

KILL_SHADOW_S = 5.0
"""For this number of seconds after the restart of a killed proxy, errors still count as caused by
the kill."""
MAX_LATE_CUT_SHARE = 0.03
"""Largest allowed share of cut connections that lead to a second group of the request. This happens
only if a connection is cut at the very moment when the answer is sent."""
MAX_GROWTH = 1.15
"""Largest allowed value of (memory in the last third of a run) / (memory in the first third)."""
WARM_UP_S = 60.0
"""Age of a process in seconds from which on the memory of the process counts."""


@dataclass(frozen=True, slots=True)
class ProcessKill:
    """A kill of the server or of the proxy."""

    name: str
    """Name of the killed process: "server" or "proxy"."""
    at: float
    """Unix time in seconds, from time.time()."""
    healthy_after_s: float
    """Seconds from the kill until the restarted process was healthy."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Resident memory of a process and its children at one moment."""

    name: str
    at: float
    """Unix time in seconds."""
    num_restarts: int
    """Number of times the process had been restarted before."""
    age_s: float
    """Seconds since the last start of the process."""
    mib: float


def _in_shadow(kills: Sequence[ProcessKill], since: float, until: float) -> bool:
    """Return whether the proxy was killed or restarting at any time from `since` to `until`."""
    return any(
        kill.name == "proxy"
        and since <= kill.at + kill.healthy_after_s + KILL_SHADOW_S
        and kill.at <= until
        for kill in kills
    )


def check_apps(
    requests: Sequence[ClientRequest],
    errors: Sequence[AppError],
    kills: Sequence[ProcessKill],
    num_turns_given_up: int,
) -> list[Finding]:
    """Check that every request was answered, and that only kills of the proxy caused errors."""
    unanswered = [request.name for request in requests if request.answered_at is None]
    explained = [error for error in errors if _in_shadow(kills, error.sent_at, error.at)]
    unexplained = [error for error in errors if error not in explained]
    shown = "; ".join(f"{error.app}: {error.text}" for error in unexplained[:5])
    return [
        Finding(
            "every request was answered in the end",
            f"{len(requests) - len(unanswered)} of {len(requests)} requests, "
            f"{num_turns_given_up} turns of opencode given up {' '.join(unanswered[:5])}",
            bool(requests) and not unanswered and not num_turns_given_up,
        ),
        Finding(
            "no error reached an app while only the server was killed",
            f"{len(unexplained)} {shown}",
            not unexplained,
        ),
        Finding(
            "errors in apps while the proxy was killed; all apps but the web chat retried",
            f"{len(explained)} {dict(Counter(error.app for error in explained))}",
            None,
        ),
    ]


# --- the ledger


def read_groups(ledger: Path) -> list[Json]:
    """Return all groups, oldest first."""
    return read_rows(
        ledger,
        "select group_id, question, state, reason, status, num_resent, request_json "
        "from groups order by received_at",
    )


def read_feedback_samples(ledger: Path) -> list[Json]:
    """Return all feedbacks, oldest first, with the ids under which the server trains them."""
    return read_rows(
        ledger,
        "select 'feedback:' || group_id || '/' || feedback_id as group_id, state, reason "
        "from feedback order by received_at",
    )


def check_side_calls(groups: Sequence[Json]) -> Finding:
    """Check that the proxy recognized each side call (a request of the app itself, such as for a
    title). In this benchmark, side calls have a marker in their text."""
    sides = [group for group in groups if "side-" in group["question"]]
    sides = [group for group in sides if group["state"] != "failed"]
    wrong = [
        group["group_id"] for group in sides if not (group["reason"] or "").startswith("side_call")
    ]
    figures = f"{len(sides)}, not recognized {wrong[:3]}"
    return Finding("side calls were served once", figures, not wrong)


def check_one_group_each(
    groups: Sequence[Json], requests: Sequence[ClientRequest], kills: Sequence[ProcessKill]
) -> list[Finding]:
    """Check that every answered request has one group.

    Groups in state `failed` do not count: the app got no answer from them and sent the request
    again. A request may have a second group in two cases: the proxy was killed, or the connection
    was cut when the answer had already been sent.
    """
    by_name: dict[str, list[Json]] = {request.name: [] for request in requests}
    for group in groups:
        if group["state"] == "failed":
            continue
        for word in group["question"].split():
            if word in by_name:
                by_name[word].append(group)
    without_group = [
        request.name
        for request in requests
        if request.answered_at is not None and not by_name[request.name]
    ]
    with_several = [request for request in requests if len(by_name[request.name]) > 1]
    ends = {request.name: request.answered_at or float("inf") for request in requests}
    shadowed = [one for one in with_several if _in_shadow(kills, one.started_at, ends[one.name])]
    late_cuts = [
        request
        for request in with_several
        if request not in shadowed and _all_were_sent(by_name[request.name])
    ]
    unexplained = [
        request.name
        for request in with_several
        if request not in shadowed and request not in late_cuts
    ]
    num_cut = sum(request.num_cut for request in requests)
    num_resent = sum(group["num_resent"] for group in groups)
    names = [request.name for request in (*late_cuts, *shadowed)]
    return [
        Finding(
            "every answered request has a group",
            f"{len(without_group)} have none {without_group[:5]}",
            not without_group,
        ),
        Finding(
            "no request has two groups",
            f"{len(unexplained)} have {unexplained[:5]}; {num_cut} connections cut, num_resent "
            f"{num_resent}",
            not unexplained,
        ),
        Finding(
            "exceptions: cut when the answer had been sent, and kills of the proxy",
            f"{len(late_cuts)} and {len(shadowed)} {names[:5]}",
            len(late_cuts) <= MAX_LATE_CUT_SHARE * num_cut,
        ),
    ]


def _all_were_sent(groups: Sequence[Json]) -> bool:
    """Return whether all bytes of each answer were sent over an open connection.

    The proxy cannot know that the app did not read these bytes. If the app then sends the request
    again without a retry header, the proxy treats it as a new request.
    """
    return all(group["status"] == 200 for group in groups)


def check_coding(groups: Sequence[Json]) -> Finding:
    """Check that no request of opencode has two groups.

    No two requests of opencode are equal, because each names its workspace and contains the history
    of its session.
    """
    counts = Counter(
        group["request_json"]
        for group in groups
        if "Working directory" in group["request_json"] and group["state"] != "failed"
    )
    repeated = [count for count in counts.values() if count > 1]
    figures = f"{len(counts)} requests, {len(repeated)} with two or more"
    return Finding(
        "no request of opencode has two groups", figures, not repeated if counts else None
    )


# --- memory


def check_memory(readings: Sequence[MemoryReading]) -> list[Finding]:
    """Check that memory does not grow.

    For the proxy, compare the first third and the last third of its longest period without a
    restart. The server has no such long period. For the server, take the median memory of each
    period between two restarts, and compare the medians of the first and of the last third of the
    periods.
    """
    proxy = _longest_without_restart([one for one in readings if one.name == "proxy"])
    server = [one for one in readings if one.name == "server"]
    medians = [
        (statistics.fmean(one.at for one in period), statistics.median(one.mib for one in period))
        for number in sorted({one.num_restarts for one in server})
        if (
            period := [
                one for one in server if one.num_restarts == number and one.age_s > WARM_UP_S / 2
            ]
        )
    ]
    return [
        _check_flat("the proxy's memory is flat", [(one.at, one.mib) for one in proxy]),
        _check_flat(f"the server's memory is flat over {len(medians)} starts", medians),
    ]


def _longest_without_restart(readings: Sequence[MemoryReading]) -> list[MemoryReading]:
    counts = Counter(one.num_restarts for one in readings)
    longest = max(counts, key=lambda number: counts[number]) if counts else 0
    return [one for one in readings if one.num_restarts == longest and one.age_s > WARM_UP_S]


def _check_flat(claim: str, points: Sequence[tuple[float, float]]) -> Finding:
    """Check that the memory does not grow in a series of points (Unix time in seconds, MiB)."""
    if len(points) < 3:
        return Finding(claim, f"not measured: {len(points)} points, the run is too short", None)
    third = max(1, len(points) // 3)
    first = statistics.median(mib for _, mib in points[:third])
    last = statistics.median(mib for _, mib in points[-third:])
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    minutes = (points[-1][0] - points[0][0]) / 60
    figures = f"{first:.0f} MiB in the first third, {last:.0f} in the last, "
    figures += f"{slope * 60:+.2f} MiB a minute over {minutes:.0f} minutes"
    return Finding(claim, figures, last <= MAX_GROWTH * first)
