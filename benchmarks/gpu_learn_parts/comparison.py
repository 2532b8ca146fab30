"""Compare the arms: shares of right answers to held-out questions with their intervals, and whether
each arm learned as expected. This module does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu_learn_parts.arms import Arm, ArmRun
from fakevllm.evaluation.results import UNIT_RANGE, RowScores, Scores, compare, summarize
from fakevllm.statistics.confidence_sequence import Interval


@dataclass(frozen=True, slots=True)
class Gain:
    """The shares of right answers before and after training, and their paired difference over the
    held-out questions. Each figure has a 95 % interval for fresh samples of the same questions."""

    held_out_questions: int
    start: Interval
    end: Interval
    change: Interval

    @classmethod
    def between(
        cls, start: Mapping[str, Sequence[float]], end: Mapping[str, Sequence[float]]
    ) -> Gain:
        first, second = _scores(start), _scores(end)
        before = summarize(first, UNIT_RANGE).mean
        after = summarize(second, UNIT_RANGE).mean
        change = compare(first, second, UNIT_RANGE).difference
        assert before is not None and after is not None, "some question has a reward"
        assert change is not None, "some question has rewards before and after training"
        return cls(len(first), before, after, change)


def _scores(rewards: Mapping[str, Sequence[float]]) -> Scores:
    return {question: RowScores(each, None) for question, each in rewards.items() if each}


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One row of the table of the arms."""

    name: str
    arm: Arm
    run: ArmRun
    is_judged: bool
    """Whether the arm must have learned as expected. Arms whose weights must not change are always
    judged."""

    @property
    def gain(self) -> Gain:
        return Gain.between(_all_kinds(self.run.start), _all_kinds(self.run.end))

    @property
    def gain_by_kind(self) -> dict[str, Gain]:
        return {
            kind: Gain.between(self.run.start[kind], self.run.end[kind]) for kind in self.run.end
        }

    @property
    def problem(self) -> str | None:
        """What differs from the expectation; None if nothing does."""
        change = self.gain.change
        if self.arm.control == "frozen":
            if self.run.updates:
                return f"{self.run.updates} steps changed the weights"
            return None if change.contains(0.0) else "frozen weights, and another score"
        if self.run.updates == 0:
            return "no step changed the weights"
        if not self.is_judged:
            return None
        if self.arm.control == "shuffled":
            return "learned from shuffled rewards" if change.low > 0 else None
        return None if change.low > 0 else "did not learn"

    @property
    def verdict(self) -> str:
        if self.problem is not None:
            return self.problem
        if not self.run.is_complete:
            return "as expected, but stopped by the time limit"
        is_trained = self.arm.control != "frozen"
        return "not judged" if is_trained and not self.is_judged else "as expected"

    def as_json(self) -> dict[str, Any]:
        run = asdict(self.run)
        del run["start"], run["end"]
        kinds = {kind: asdict(gain) for kind, gain in self.gain_by_kind.items()}
        return {
            "arm": self.name,
            **asdict(self.arm),
            **run,
            **asdict(self.gain),
            "kinds": kinds,
            "verdict": self.verdict,
            "problem": self.problem,
        }

    @property
    def cells(self) -> dict[str, str]:
        """The cells of the table, by column."""
        gain = self.gain
        kinds = {
            kind: f"{each.start.mean:.2f} → {each.end.mean:.2f}"
            for kind, each in self.gain_by_kind.items()
        }
        return {
            "arm": self.name,
            "N": str(self.arm.num_siblings),
            "steps": str(self.run.steps),
            "questions": str(self.run.questions),
            "answers": str(self.run.answers),
            "right at the start": f"{gain.start.mean:.3f}",
            "right at the end": f"{gain.end.mean:.3f} {_range(gain.end)}",
            "change": f"{gain.change.mean:+.3f} {_range(gain.change)}",
            **kinds,
            "training": f"{self.run.train_s:.0f} s",
            "verdict": self.verdict,
        }


def _range(interval: Interval) -> str:
    return f"({interval.low:.2f} to {interval.high:.2f})"


def _all_kinds(rewards: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Sequence[float]]:
    return {question: each for kind in rewards.values() for question, each in kind.items()}


def table_of(reports: Iterable[ArmReport]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of the arms."""
    rows = [report.cells for report in reports]
    return list(rows[0]), [list(row.values()) for row in rows]
