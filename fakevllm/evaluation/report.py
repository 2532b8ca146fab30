"""The report of an evaluation, made of the proxy's replies. This module is pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fakevllm.evaluation.messages import RowReply
from fakevllm.evaluation.results import (
    RowScores,
    Scores,
    Summary,
    covering_range,
    summarize,
    unsolved_rows,
)
from fakevllm.statistics.confidence_sequence import ALPHA, Interval, RewardRange
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row with the proxy's reply."""

    task: Task
    reply: RowReply

    @property
    def has_answers(self) -> bool:
        return any(sample.text is not None for sample in (self.reply.greedy, *self.reply.samples))

    @property
    def scores(self) -> RowScores | None:
        """The rewards of the row; None if no sample at temperature 1 has a reward."""
        rewards = [sample.reward for sample in self.reply.samples if sample.reward is not None]
        return RowScores(rewards, self.reply.greedy.reward) if rewards else None


@dataclass(frozen=True)
class EvalReport:
    """The results of all rows, with the settings that their interpretation needs."""

    dataset: str
    """Name of the dataset's file."""
    eval_id: str
    num_samples: int
    declared_range: RewardRange
    declared_solved_at: float | None
    """Reward from which on a row counts as solved; None means the highest possible reward."""
    rows: Sequence[RowResult]

    @cached_property
    def scores(self) -> Scores:
        """The scores of the rows that were scored, by row id."""
        pairs = [(row.task.task_id, row.scores) for row in self.rows]
        return {row_id: scores for row_id, scores in pairs if scores is not None}

    @cached_property
    def rewards(self) -> RewardRange:
        """The range of rewards that the intervals assume."""
        return covering_range(self.declared_range, [self.scores])

    @cached_property
    def solved_at(self) -> float:
        """Reward from which on a row counts as solved."""
        declared = self.declared_solved_at
        return self.rewards.high if declared is None else declared

    @cached_property
    def summaries(self) -> list[Summary]:
        """One summary per version."""
        return [summarize(self.scores, self.rewards)]

    @property
    def labels(self) -> list[str]:
        """The name of each version: its number, or the first and the last number if the server
        published new weights while rows were sampled. `?` if the server did not report it."""
        known = [
            version
            for row in self.rows
            for version in (row.reply.first_version, row.reply.last_version)
            if version is not None
        ]
        if not known:
            return ["?"]
        first, last = min(known), max(known)
        return [str(first) if first == last else f"{first} to {last}"]

    @cached_property
    def unsolved(self) -> list[str]:
        """The ids of the rows that no sample has solved."""
        return unsolved_rows([self.scores], self.solved_at)

    @property
    def unscored(self) -> list[RowResult]:
        """The rows without a reward."""
        return [row for row in self.rows if row.scores is None]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        unsolved = set(self.unsolved)
        versions = [
            {
                "version": label,
                "rows": summary.num_rows,
                **_interval(summary.mean),
                "greedy": summary.greedy,
            }
            for label, summary in zip(self.labels, self.summaries, strict=True)
        ]
        return {
            "dataset": self.dataset,
            "eval_id": self.eval_id,
            "samples": self.num_samples,
            "alpha": ALPHA,
            "reward_range": [self.rewards.low, self.rewards.high],
            "solved_at": self.solved_at,
            "versions": versions,
            "num_unsolved": len(unsolved),
            "num_unscored": len(self.unscored),
            "rows": [
                {
                    "row_id": row.task.task_id,
                    "question": row.task.main_query,
                    "is_unsolved": row.task.task_id in unsolved,
                    **row.reply.model_dump(mode="json"),
                }
                for row in self.rows
            ],
        }


def _interval(interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {"mean": None, "low": None, "high": None}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}
