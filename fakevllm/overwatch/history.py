"""What the server's run log has told so far: the steps as they stand, what evaluations of their
weights came to, and its last lines. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fakevllm_adapters.protocol.swarm import LogEntry

MAX_STEPS = 5_000
"""The last ones; a chart has fewer columns."""
MAX_LINES = 50


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluations of one step's weights; step 0: of those before any step."""

    step: int
    episodes: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def joined(self, reward: float) -> Evaluated:
        low, high = min(self.low, reward), max(self.high, reward)
        return Evaluated(self.step, self.episodes + 1, self.total + reward, low, high)


@dataclass(frozen=True, slots=True)
class LogLine:
    text: str
    is_trouble: bool = False
    times: int = 1
    """One after the other: groups that come when training is over are dropped one by one."""


@dataclass(frozen=True, slots=True)
class History:
    run_id: str = ""
    last_seq: int = 0
    steps: tuple[Step, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    """By step, from the weights before the first of `steps` on."""
    lines: tuple[LogLine, ...] = ()

    def of_run(self, run_id: str) -> History:
        """Another run has a log of its own."""
        return self if self.run_id == run_id else History(run_id)

    def followed(self, entries: Iterable[LogEntry]) -> History:
        steps, lines, last_seq = list(self.steps), list(self.lines), self.last_seq
        evaluated = {one.step: one for one in self.evaluated}
        for entry in entries:
            last_seq = max(last_seq, entry.seq)
            if entry.kind == "restored":
                steps = [step for step in steps if step.number <= entry.step]
                if entry.reason:  # else the steps are trained again, as they were
                    evaluated = {step: one for step, one in evaluated.items() if step <= entry.step}
            elif entry.kind == "evaluated" and "reward" in entry.metrics:
                known = evaluated.get(entry.step, Evaluated(entry.step))
                evaluated[entry.step] = known.joined(entry.metrics["reward"])
            elif entry.kind == "step":  # one that is trained again takes its own place
                steps = [step for step in steps if step.number < entry.step]
                steps.append(Step(entry.step, entry.version, entry.metrics))
            line = line_of(entry)
            if line is not None and lines and lines[-1].text == line.text:
                lines[-1] = replace(line, times=lines[-1].times + 1)
            elif line is not None:
                lines.append(line)
        steps = steps[-MAX_STEPS:]
        oldest = steps[0].number - 1 if steps else 0
        return replace(
            self,
            last_seq=last_seq,
            steps=tuple(steps),
            evaluated=tuple(one for step, one in sorted(evaluated.items()) if step >= oldest),
            lines=tuple(lines[-MAX_LINES:]),
        )


def line_of(entry: LogEntry) -> LogLine | None:
    """None for what nobody has to read.

    >>> line_of(LogEntry(seq=1, kind="dropped", step=2, reasons={"a": "stale: old", "b": "stale"}))
    LogLine(text='dropped 2 groups at step 2: 2 stale', is_trouble=False, times=1)
    """
    match entry.kind:
        case "step":
            return LogLine(f"step {entry.step} → version {entry.version}: {_told(entry.metrics)}")
        case "dropped":
            why = Counter(reason.partition(":")[0] for reason in entry.reasons.values())
            told = ", ".join(f"{number} {reason}" for reason, number in why.most_common())
            return LogLine(f"dropped {_groups(len(entry.reasons))} at step {entry.step}: {told}")
        case "restored":
            lost = f", {_groups(len(entry.lost))} lost" if entry.lost else ""
            why = f": {entry.reason}" if entry.reason else ""
            return LogLine(f"back to the end of step {entry.step}{lost}{why}", is_trouble=True)
        case "stopped":
            return LogLine(f"no more steps after {entry.step}: {entry.reason}", is_trouble=True)
        case _:
            return None


def _told(metrics: Mapping[str, float]) -> str:
    """Shorter than the server's own line: the numbers stand beside it."""
    parts: list[str] = []
    if "reward_mean" in metrics:
        parts.append(f"reward {metrics['reward_mean']:.3f} of {_groups(metrics.get('groups', 0))}")
    parts.append(f"{metrics.get('tokens_trained', 0):.0f} tokens trained")
    if metrics.get("skipped"):
        parts.append("NO UPDATE" if metrics.get("no_update") else "NOT ALL UPDATES")
    if "step_seconds" in metrics:
        parts.append(f"{metrics['step_seconds']:.1f} s")
    return ", ".join(parts)


def _groups(number: float) -> str:
    return f"{number:.0f} group{'s' * (number != 1)}"
