"""The run's log: which groups were acknowledged, trained, dropped or lost. Append-only, one JSON
object a line.

A line is handed to the operating system before the acknowledgement it stands for, so it survives a
kill of the
process (not a power cut). Readers keep a cursor: the number of the last entry they have seen.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from fakevllm_adapters.swarm import LogEntry, TrainedGroup
from fakevllm_server.config import ConfigError
from fakevllm_server.coverage import totals

KINDS = frozenset({"acked", "step", "dropped", "restored", "stopped"})


@dataclass(slots=True)
class Standing:
    """What the entries so far add up to."""

    pending: set[str] = field(default_factory=set[str])
    """Acknowledged, neither trained nor dropped nor lost."""
    trained: dict[str, int] = field(default_factory=dict[str, int])
    """Group id to the step it was trained in."""
    gone: dict[str, str] = field(default_factory=dict[str, str])
    """Dropped or lost, with the reason."""
    version: int = 0
    """Highest version ever published."""
    last_step: int = 0
    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Counts of all steps by their metric's name, steps that were lost later among them."""

    def apply(self, entry: LogEntry) -> None:
        ids = [group.group_id for group in entry.groups]
        self.version = max(self.version, entry.version)
        match entry.kind:
            case "acked":
                self.pending.update(ids)
            case "step":
                self.pending.difference_update(ids)
                self.trained |= dict.fromkeys(ids, entry.step)
                self.last_step = entry.step
                for name, value in totals(entry.metrics).items():
                    self.totals[name] += value
            case "dropped":
                self.pending.difference_update(entry.reasons)
                self.gone |= entry.reasons
            case "restored":
                self.pending.difference_update(entry.lost)
                self.gone |= dict.fromkeys(entry.lost, "lost_in_crash")
                self.last_step = entry.step
                for group_id in entry.lost:
                    self.trained.pop(group_id, None)
            case _:
                pass

    def trained_after(self, step: int) -> set[str]:
        return {group_id for group_id, trained_in in self.trained.items() if trained_in > step}


class RunLog:
    """The file, and its standing in memory. One writer: the server's event loop."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where a whole line of the file is no entry."""
        self.standing = Standing()
        self._told: list[LogEntry] = []
        self._seq = 0
        torn = _read(path, self._learn)
        self._file = path.open("ab", buffering=0)
        os.chmod(path, 0o600)
        if (
            torn is not None
        ):  # a crash in the middle of a line: nothing was acknowledged on its strength
            self._file.truncate(torn)

    def acked(self, group_id: str, step: int) -> None:
        self._append(LogEntry(seq=0, kind="acked", step=step, groups=[_named(group_id)]))

    def trained(
        self, step: int, version: int, groups: list[TrainedGroup], metrics: dict[str, float]
    ) -> None:
        self._append(
            LogEntry(seq=0, kind="step", step=step, version=version, groups=groups, metrics=metrics)
        )

    def recovered(self, step: int, version: int, consumed: Sequence[str]) -> None:
        """A checkpoint knows of trained groups whose lines a power cut took from here."""
        missing = [_named(name) for name in consumed if name not in self.standing.trained]
        if missing:
            self.trained(step, version, missing, {})

    def dropped(self, step: int, reasons: dict[str, str]) -> None:
        if reasons:
            self._append(LogEntry(seq=0, kind="dropped", step=step, reasons=reasons))

    def stopped(self, step: int, reason: str) -> None:
        """No more steps are taken until the engine is started again."""
        self._append(LogEntry(seq=0, kind="stopped", step=step, reason=reason))

    def restored(self, step: int, version: int, lost: Iterable[str]) -> None:
        self._append(
            LogEntry(seq=0, kind="restored", step=step, version=version, lost=sorted(lost))
        )

    def after(self, seq: int, limit: int = 1000) -> list[LogEntry]:
        """Entries with a higher number, oldest first. Acknowledgements are kept for recovery and
        not told."""
        start = bisect_right(self._told, seq, key=lambda entry: entry.seq)
        return self._told[start : start + limit]

    def close(self) -> None:
        self._file.close()

    def _append(self, entry: LogEntry) -> None:
        entry.seq = self._seq + 1
        self._file.write(entry.model_dump_json(exclude_defaults=True).encode() + b"\n")
        self._learn(entry)

    def _learn(self, entry: LogEntry) -> None:
        self._seq = entry.seq
        self.standing.apply(entry)
        if entry.kind != "acked":
            self._told.append(entry)


def _named(group_id: str) -> TrainedGroup:
    return TrainedGroup(group_id=group_id, siblings=[])


def _read(path: Path, learn: Callable[[LogEntry], None]) -> int | None:
    """Feeds every whole line to `learn`. Returns where a torn last line begins, or None."""
    if not path.exists():
        return None
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return at
            try:
                entry = _entry(line)
            except (ValueError, AttributeError):
                raise ConfigError(
                    f"{path}, line {number}, is no entry of a run's log: "
                    "mend the line, or choose another --run-dir."
                ) from None
            learn(entry)
            at += len(line)
    return None


def _entry(line: bytes) -> LogEntry:
    """A null metric of an older log was not finite; it is left out. Raises ValueError for a kind
    that is not known: here it may mean groups that are not to be trained again."""
    raw: Any = orjson.loads(line)
    metrics: dict[str, float | None] = raw.get("metrics", {})
    raw["metrics"] = {name: value for name, value in metrics.items() if value is not None}
    if raw.get("kind") not in KINDS:
        raise ValueError(f"entries of kind {raw.get('kind')!r} are of a newer version")
    return LogEntry.model_validate(raw)
