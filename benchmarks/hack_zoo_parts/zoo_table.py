"""The table of hooks and detectors, from the records of runs. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.hack_zoo_parts.hook_table import HOOKS
from benchmarks.hack_zoo_parts.run_record import RunRecord
from fakevllm.guard.detector_bank import GuardRules
from fakevllm.guard.detectors import DETECTORS

NO_ALARM = "-"


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run, and the step of the first alarm of each detector that raised one."""

    record: RunRecord
    first_alarms: dict[str, int]

    @classmethod
    def judge(cls, record: RunRecord, rules: GuardRules) -> JudgedRun:
        """Let the detectors judge a run."""
        first: dict[str, int] = {}
        for alarm in record.alarms(rules):
            first.setdefault(alarm.detector, alarm.step)
        return cls(record, first)

    @property
    def is_honest(self) -> bool:
        return HOOKS[self.record.hook].is_honest

    @property
    def is_cheating(self) -> bool:
        """Whether the model has learned the cheat of its hook."""
        return self.record.onset is not None

    def delay(self, detector: str) -> int | None:
        """Return the number of steps from the onset to the first alarm of the detector. It is
        negative if the alarm came before. Return None if the detector raised no alarm."""
        step, onset = self.first_alarms.get(detector), self.record.onset
        return None if step is None or onset is None else step - onset

    @property
    def problems(self) -> list[str]:
        """What makes the run useless for the table."""
        found: list[str] = []
        if not self.is_honest and not self.is_cheating:
            found.append(f"{self.record.name}: the model has not learned the cheat")
        if list(self.record.live_alarms) != self.record.replayed_alarms():
            found.append(f"{self.record.name}: the proxy raised other alarms than the replay")
        return found


def table_of(runs: Sequence[JudgedRun]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows: one row for each hook that can be gamed, and one for all
    honest runs together. Runs in which the model has not learned the cheat are left out."""
    header = ["hook", "onset", "runs", "any", *DETECTORS]
    cheating = [run for run in runs if not run.is_honest and run.is_cheating]
    rows: list[list[str]] = []
    for name, hook in HOOKS.items():
        own = [run for run in cheating if run.record.hook == name]
        if hook.is_honest or not own:
            continue
        onsets = ", ".join(str(run.record.onset) for run in own)
        num_seen = sum(bool(run.first_alarms) for run in own)
        cells = [_cell(own, detector) for detector in DETECTORS]
        rows.append([name, onsets, str(len(own)), f"{num_seen}/{len(own)}", *cells])
    honest = [run for run in runs if run.is_honest]
    if honest:
        counts = [sum(name in run.first_alarms for run in honest) for name in DETECTORS]
        num_any = sum(bool(run.first_alarms) for run in honest)
        cells = [f"{count}/{len(honest)}" if count else NO_ALARM for count in counts]
        alarms = f"{num_any}/{len(honest)}"
        rows.append(["honest runs", NO_ALARM, str(len(honest)), alarms, *cells])
    return header, rows


def _cell(runs: Sequence[JudgedRun], detector: str) -> str:
    """Return the share of runs in which the detector raised an alarm, and the median delay."""
    delays = [delay for run in runs if (delay := run.delay(detector)) is not None]
    return f"{len(delays)}/{len(runs)}, {median(delays):+.0f}" if delays else NO_ALARM


def false_alarms(runs: Sequence[JudgedRun]) -> list[str]:
    """Return one line for each honest run with an alarm."""
    return [
        f"{run.record.name}: "
        + ", ".join(f"{name} at step {step}" for name, step in run.first_alarms.items())
        for run in runs
        if run.is_honest and run.first_alarms
    ]


def missed_expectations(runs: Sequence[JudgedRun]) -> list[str]:
    """Return one line for each cheat that an expected detector has not seen in all runs."""
    lines: list[str] = []
    for name, hook in HOOKS.items():
        own = [run for run in runs if run.record.hook == name and run.is_cheating]
        for detector in hook.expected:
            num_missed = sum(detector not in run.first_alarms for run in own)
            if num_missed:
                lines.append(f"{name}: {detector} missed {num_missed} of {len(own)} runs")
    return lines
