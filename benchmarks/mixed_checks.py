"""What must hold after the mixed traffic: of the ledger, of the server's log, of the memory."""

from __future__ import annotations

import sqlite3
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mixed_clients import Asked, Trouble
from benchmarks.run_logs import surviving_steps

Json = dict[str, Any]

KILL_SHADOW_S = 5.0
"""What a killed proxy may be blamed for: until so long after the kill."""
MAX_TOLD_SHARE = 0.03
"""Of cut connections: those that were cut in the very moment of the answer."""
MAX_GROWTH = 1.15
"""Memory of the last third beside that of the first."""
WARM_S = 60.0
"""Of a process, before its memory counts."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    told: str
    is_good: bool | None
    """None: nothing must hold, or nothing was there to hold it against. It is only told."""

    @property
    def mark(self) -> str:
        return "told" if self.is_good is None else "ok" if self.is_good else "FAILED"


@dataclass(frozen=True, slots=True)
class Kill:
    name: str
    at: float
    """By time.time()."""
    healthy_after_s: float


@dataclass(frozen=True, slots=True)
class Weight:
    """Resident memory of a process and its children."""

    name: str
    at: float
    life: int
    """How often it was started before."""
    age_s: float
    mib: float


def _in_shadow(kills: Sequence[Kill], since: float, until: float) -> bool:
    """Whether a proxy was killed, or on its way back, between the two."""
    return any(
        kill.name == "proxy"
        and since <= kill.at + kill.healthy_after_s + KILL_SHADOW_S
        and kill.at <= until
        for kill in kills
    )


def check_apps(
    asked: Sequence[Asked], troubles: Sequence[Trouble], kills: Sequence[Kill], given_up: int
) -> list[Finding]:
    unanswered = [one.name for one in asked if one.ended is None]
    blamed = [one for one in troubles if _in_shadow(kills, one.since, one.at)]
    bare = [one for one in troubles if one not in blamed]
    said = "; ".join(f"{one.app}: {one.text}" for one in bare[:5])
    return [
        Finding(
            "every request was answered in the end",
            f"{len(asked) - len(unanswered)} of {len(asked)} requests, {given_up} turns of "
            f"opencode given up {' '.join(unanswered[:5])}",
            bool(asked) and not unanswered and not given_up,
        ),
        Finding(
            "no error reached an app while only the server was killed",
            f"{len(bare)} {said}",
            not bare,
        ),
        Finding(
            "errors that apps saw while the proxy was killed: all but web chats asked again",
            f"{len(blamed)} {dict(Counter(one.app for one in blamed))}",
            None,
        ),
    ]


# --- the ledger


def read_groups(ledger: Path) -> list[Json]:
    return _rows(
        ledger,
        "select group_id, question, state, reason, status, num_resent, request_json "
        "from groups order by received_at",
    )


def read_samples(ledger: Path) -> list[Json]:
    """What was said of answers, by the names under which the server trains it."""
    return _rows(
        ledger,
        "select 'feedback:' || group_id || '/' || feedback_id as group_id, state, reason "
        "from feedback order by received_at",
    )


def _rows(file: Path, sql: str) -> list[Json]:
    with closing(sqlite3.connect(file)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(sql)]


def check_file(ledger: Path) -> Finding:
    with closing(sqlite3.connect(ledger)) as db:
        integrity = str(db.execute("pragma integrity_check").fetchone()[0])
        dangling = db.execute("pragma foreign_key_check").fetchall()
    told = f"integrity_check {integrity}, {len(dangling)} dangling rows"
    return Finding("the ledger is whole", told, integrity == "ok" and not dangling)


def is_waiting(row: Json) -> bool:
    return row["state"] in ("scored", "received", "pooled")


def check_states(groups: Sequence[Json], samples: Sequence[Json] = ()) -> list[Finding]:
    rows = [*groups, *samples]
    states = Counter(group["state"] for group in groups)
    said = Counter(sample["state"] for sample in samples)
    waiting = [one["group_id"] for one in rows if is_waiting(one)]
    lost = Counter(one["reason"] for one in rows if one["state"] == "lost")
    reasons = Counter(f"{one['state']}: {one['reason']}" for one in rows if one["reason"])
    return [
        Finding(
            "no group is left scored or pooled",
            f"{len(groups)} groups: {dict(states)}; {len(samples)} feedbacks: {dict(said)} "
            f"{' '.join(waiting[:5])}",
            not waiting,
        ),
        Finding(
            "no group was lost",
            f"{lost.total()} {dict(lost)}",
            not lost,
        ),
        Finding("why groups were not trained", f"{dict(reasons.most_common())}", None),
    ]


def check_side_calls(groups: Sequence[Json]) -> Finding:
    """By what stands in their text, beside what the proxy took them for."""
    sides = [one for one in groups if "side-" in one["question"] and one["state"] != "failed"]
    unlike = [one["group_id"] for one in sides if not (one["reason"] or "").startswith("side_call")]
    told = f"{len(sides)}, taken for others {unlike[:3]}"
    return Finding("side calls were served once", told, not unlike)


def check_one_group_each(
    groups: Sequence[Json], asked: Sequence[Asked], kills: Sequence[Kill]
) -> list[Finding]:
    """Groups that answered nobody (`failed`: asked anew) do not count."""
    found: dict[str, list[Json]] = {one.name: [] for one in asked}
    for group in groups:
        if group["state"] == "failed":
            continue
        for word in group["question"].split():
            if word in found:
                found[word].append(group)
    none = [one.name for one in asked if one.ended is not None and not found[one.name]]
    many = [one for one in asked if len(found[one.name]) > 1]
    ends = {one.name: one.ended or float("inf") for one in asked}
    shadowed = [one for one in many if _in_shadow(kills, one.began, ends[one.name])]
    told = [one for one in many if one not in shadowed and _was_told(found[one.name])]
    bare = [one.name for one in many if one not in shadowed and one not in told]
    num_cut = sum(one.num_cut for one in asked)
    num_resent = sum(group["num_resent"] for group in groups)
    names = [one.name for one in (*told, *shadowed)]
    return [
        Finding(
            "every answered request has a group", f"{len(none)} have none {none[:5]}", not none
        ),
        Finding(
            "none has two",
            f"{len(bare)} have {bare[:5]}; {num_cut} connections cut, num_resent {num_resent}",
            not bare,
        ),
        Finding(
            "but for those cut when the answer was out, and those of a killed proxy",
            f"{len(told)} and {len(shadowed)} {names[:5]}",
            len(told) <= MAX_TOLD_SHARE * num_cut,
        ),
    ]


def _was_told(groups: Sequence[Json]) -> bool:
    """The last byte of each answer went out to a connection that was there: nothing tells that it
    was not read, and who asks again without a mark is a new request."""
    return all(group["status"] == 200 for group in groups)


def check_coding(groups: Sequence[Json]) -> Finding:
    """No two requests of opencode are equal: each names its workspace and tells its history."""
    bodies = Counter(
        one["request_json"]
        for one in groups
        if "Working directory" in one["request_json"] and one["state"] != "failed"
    )
    many = [count for count in bodies.values() if count > 1]
    told = f"{len(bodies)} requests, {len(many)} with two or more"
    is_good = not many if bodies else None
    return Finding("no request of opencode has two groups", told, is_good)


def check_trained_once(entries: Sequence[Json], rows: Sequence[Json]) -> list[Finding]:
    """`entries`: of the server's run log; `rows`: the ledger's groups and feedbacks."""
    steps = surviving_steps(entries)
    counts = Counter[str](group["group_id"] for entry in steps for group in entry["groups"])
    num_undone = sum(entry["kind"] == "step" for entry in entries) - len(steps)
    twice = [name for name, count in counts.items() if count > 1]
    kept = set(counts)
    told: set[str] = {one["group_id"] for one in rows if one["state"] == "trained"}
    return [
        Finding(
            "no group was trained twice",
            f"{len(steps)} steps of {len(counts)} groups and feedbacks, twice {twice[:5]}",
            bool(counts) and not twice,
        ),
        Finding(
            "ledger and server agree on what was trained",
            f"{len(told)} and {len(kept)}; {num_undone} steps were undone by kills and made again; "
            f"only in one: {sorted(told ^ kept)[:5]}",
            told == kept,
        ),
    ]


# --- memory


def check_memory(weights: Sequence[Weight]) -> list[Finding]:
    """Of the proxy: its longest life, a first third beside the last. Of the server, which never
    lives long: its lives, each by its median."""
    proxy = _longest([one for one in weights if one.name == "proxy"])
    server = [one for one in weights if one.name == "server"]
    lives = sorted({one.life for one in server})
    medians = [
        (statistics.fmean(one.at for one in own), statistics.median(one.mib for one in own))
        for life in lives
        if (own := [one for one in server if one.life == life and one.age_s > WARM_S / 2])
    ]
    return [
        _flat("the proxy's memory is flat", [(one.at, one.mib) for one in proxy]),
        _flat(f"the server's memory is flat over {len(medians)} lives", medians),
    ]


def _longest(weights: Sequence[Weight]) -> list[Weight]:
    lives = Counter(one.life for one in weights)
    life = max(lives, key=lambda one: lives[one]) if lives else 0
    return [one for one in weights if one.life == life and one.age_s > WARM_S]


def _flat(what: str, points: Sequence[tuple[float, float]]) -> Finding:
    if len(points) < 3:
        return Finding(what, f"not measured: {len(points)} points, the run is too short", None)
    third = max(1, len(points) // 3)
    first = statistics.median(mib for _, mib in points[:third])
    last = statistics.median(mib for _, mib in points[-third:])
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    minutes = (points[-1][0] - points[0][0]) / 60
    told = f"{first:.0f} MiB in the first third, {last:.0f} in the last, "
    told += f"{slope * 60:+.2f} MiB a minute over {minutes:.0f} minutes"
    return Finding(what, told, last <= MAX_GROWTH * first)
