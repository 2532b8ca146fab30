"""History of a run, built from the server's run log: its training steps, its evaluations and the
last log lines.

This module does no I/O. A `History` is immutable, and `History.with_entries` returns a new one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fakevllm.overwatch.formatting import format_groups
from fakevllm_adapters.protocol.swarm import LogEntry

MAX_STEPS = 5_000
"""Maximum number of steps that are kept. Older steps are removed. This number is larger than the
number of columns of any chart."""
MAX_LINES = 50
"""Maximum number of log lines that are kept. Older lines are removed."""


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    version: int
    metrics: Mapping[str, float]
    changed: str = ""
    """What changed between the previous step and this step, such as `the hooks changed`; "" if
    nothing changed. After a change, rewards cannot be compared with earlier rewards."""


@dataclass(frozen=True, slots=True)
class EvaluationRewards:
    """Number, sum, minimum and maximum of the rewards of evaluation episodes. All these episodes
    were sampled with the weights that the training step `step` produced."""

    step: int
    """Number of the training step that produced the weights; 0 for the weights before the first
    step."""
    episodes: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def with_reward(self, reward: float) -> EvaluationRewards:
        low, high = min(self.low, reward), max(self.high, reward)
        return EvaluationRewards(self.step, self.episodes + 1, self.total + reward, low, high)


@dataclass(frozen=True, slots=True)
class LogLine:
    """An entry of the run log as one line of text for the screen."""

    text: str
    is_trouble: bool = False
    times: int = 1
    """Number of consecutive entries with this text, which are shown as one line."""


@dataclass(frozen=True, slots=True)
class History:
    """The steps, evaluations and last log lines of one run."""

    run_id: str = ""
    last_seq: int = 0
    """Sequence number of the last entry that was read."""
    steps: tuple[Step, ...] = ()
    evaluations: tuple[EvaluationRewards, ...] = ()
    """Evaluations ordered by step. Evaluations of old weights are removed. Weights are old if they
    are older than the weights with which the first step in `steps` began."""
    lines: tuple[LogLine, ...] = ()

    def for_run(self, run_id: str) -> History:
        """Return this history if it belongs to the run with the id `run_id`. Otherwise return an
        empty history for that run."""
        return self if self.run_id == run_id else History(run_id)

    def with_entries(self, entries: Iterable[LogEntry]) -> History:
        """Return a new history that also contains `entries`, the next entries of the run log in the
        order of the log."""
        steps, lines, last_seq = list(self.steps), list(self.lines), self.last_seq
        evaluations = {evaluation.step: evaluation for evaluation in self.evaluations}
        for entry in entries:
            last_seq = max(last_seq, entry.seq)
            if entry.kind == "restored":
                steps = [step for step in steps if step.number <= entry.step]
                if entry.reason:  # without a reason, the same steps are trained again
                    evaluations = {
                        step: evaluation
                        for step, evaluation in evaluations.items()
                        if step <= entry.step
                    }
            elif entry.kind == "evaluated" and "reward" in entry.metrics:
                evaluation = evaluations.get(entry.step, EvaluationRewards(entry.step))
                evaluations[entry.step] = evaluation.with_reward(entry.metrics["reward"])
            elif entry.kind == "step":  # a step that is trained again replaces its old entry
                steps = [step for step in steps if step.number < entry.step]
                steps.append(Step(entry.step, entry.version, entry.metrics, entry.changed))
            _append_line(lines, describe_entry(entry))
        steps = steps[-MAX_STEPS:]
        oldest = steps[0].number - 1 if steps else 0
        return replace(
            self,
            last_seq=last_seq,
            steps=tuple(steps),
            evaluations=tuple(
                evaluation for step, evaluation in sorted(evaluations.items()) if step >= oldest
            ),
            lines=tuple(lines[-MAX_LINES:]),
        )


def _append_line(lines: list[LogLine], line: LogLine | None) -> None:
    """Append a line to `lines`. If the last line has the same text, increase the count of the last
    line instead."""
    if line is not None and lines and lines[-1].text == line.text:
        lines[-1] = replace(line, times=lines[-1].times + 1)
    elif line is not None:
        lines.append(line)


def describe_entry(entry: LogEntry) -> LogLine | None:
    """Return an entry of the run log as a line of text.

    Return None if the screen does not show entries of this kind.

    >>> reasons = {"a": "stale: old", "b": "stale"}
    >>> describe_entry(LogEntry(seq=1, kind="dropped", step=2, reasons=reasons))
    LogLine(text='dropped 2 groups at step 2: 2 stale', is_trouble=False, times=1)
    """
    match entry.kind:
        case "step":
            metrics = _describe_metrics(entry.metrics)
            changed = f"; {entry.changed}" if entry.changed else ""
            return LogLine(f"step {entry.step} → version {entry.version}: {metrics}{changed}")
        case "dropped":
            slugs = Counter(reason.partition(":")[0] for reason in entry.reasons.values())
            counts = ", ".join(f"{count} {slug}" for slug, count in slugs.most_common())
            groups = format_groups(len(entry.reasons))
            return LogLine(f"dropped {groups} at step {entry.step}: {counts}")
        case "restored":
            lost = f", {format_groups(len(entry.lost))} lost" if entry.lost else ""
            reason = f": {entry.reason}" if entry.reason else ""
            return LogLine(f"back to the end of step {entry.step}{lost}{reason}", is_trouble=True)
        case "stopped":
            return LogLine(f"no more steps after {entry.step}: {entry.reason}", is_trouble=True)
        case _:
            return None


def _describe_metrics(metrics: Mapping[str, float]) -> str:
    """Return the most important metrics of a step as a short text. A table on the same screen shows
    more metrics."""
    parts: list[str] = []
    if "reward_mean" in metrics:
        groups = format_groups(metrics.get("groups", 0))
        parts.append(f"reward {metrics['reward_mean']:.3f} of {groups}")
    parts.append(f"{metrics.get('tokens_trained', 0):.0f} tokens trained")
    if (num_updates := metrics.get("updates_made", 0)) > 1:
        parts.append(f"{num_updates:.0f} updates")
    if metrics.get("skipped"):
        parts.append("NO UPDATE" if metrics.get("no_update") else "NOT ALL UPDATES")
    if "step_seconds" in metrics:
        parts.append(f"{metrics['step_seconds']:.1f} s")
    return ", ".join(parts)
