"""What the guard remembers over a restart, as JSON: how far it has read the run log, the memory of
the detectors, and the actions that are not carried out yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from fakevllm.guard.detector_bank import Alarm, DetectorBank, EvaluatedVersion, GuardRules

MAX_PENDING = 16
"""Maximum number of actions that wait to be carried out. Each detector has at most one, unless its
alarm ends and begins again meanwhile."""


@dataclass(slots=True)
class StoredGuard:
    """The JSON of the guard's memory."""

    run_id: str
    seq: int
    """Number of the last entry of the run log that was read."""
    trends: dict[str, tuple[list[float], list[float]]] = field(
        default_factory=dict[str, tuple[list[float], list[float]]]
    )
    """First and latest values of each figure."""
    evaluated: list[EvaluatedVersion] = field(default_factory=list[EvaluatedVersion])
    active: list[Alarm] = field(default_factory=list[Alarm])
    pending: list[Alarm] = field(default_factory=list[Alarm])
    """Alarms whose action is not carried out yet, oldest first."""
    hooks: list[str] = field(default_factory=list[str])
    """Digests of the hook files that scored the latest step."""
    newest_version: int = 0
    ignored_up_to: int = -1


_STORED = TypeAdapter(StoredGuard)


@dataclass(slots=True)
class GuardState:
    """The guard's memory of one run."""

    run_id: str
    bank: DetectorBank
    seq: int = 0
    """Number of the last entry of the run log that was read."""
    pending: list[Alarm] = field(default_factory=list[Alarm])
    """Alarms whose action is not carried out yet, oldest first."""
    stored_seq: int = 0
    """The value of `seq` in the stored memory."""
    begun: list[Alarm] = field(default_factory=list[Alarm])
    """Alarms that are not raised yet. They are not stored: after a restart, the entries of the run
    log from which they follow are read again."""
    hooks: list[str] = field(default_factory=list[str])
    """Digests of the hook files that scored the latest step."""

    def to_json(self) -> str:
        bank = self.bank
        stored = StoredGuard(
            self.run_id,
            self.seq,
            {name: (trend.first, list(trend.latest)) for name, trend in bank.trends.items()},
            bank.evaluated,
            list(bank.active.values()),
            self.pending,
            self.hooks,
            bank.newest_version,
            bank.ignored_up_to,
        )
        return _STORED.dump_json(stored).decode()


def restored(text: str | None, run_id: str, rules: GuardRules) -> GuardState:
    """Return the stored memory of a run. Return an empty memory if there is none, if it is about
    another run, or if another version of fakevllm has stored it in another form."""
    bank = DetectorBank(rules)
    state = GuardState(run_id, bank)
    try:
        stored = _STORED.validate_json(text or "")
    except ValidationError:
        return state
    if stored.run_id != run_id:
        return state
    for name, (first, latest) in stored.trends.items():
        bank.trends[name] = rules.new_trend(name, first, latest)
    bank.evaluated = stored.evaluated
    bank.newest_version, bank.ignored_up_to = stored.newest_version, stored.ignored_up_to
    bank.active = {one.detector: one for one in stored.active if one.detector in rules.thresholds}
    state.seq = state.stored_seq = stored.seq
    state.pending, state.hooks = stored.pending, stored.hooks
    return state
