"""The report of an evaluation, made from the proxy's replies. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fakevllm.evaluation.messages import RowReply
from fakevllm.evaluation.results import (
    Comparison,
    RowScores,
    Scores,
    Summary,
    compare,
    covering_range,
    summarize,
    unsolved_rows,
)
from fakevllm.statistics.confidence_sequence import ALPHA, Interval, RewardRange
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class RowResult:
    """One dataset row of an evaluation, with the proxy's replies: one reply for each evaluated
    version of the weights."""

    task: Task
    replies: Sequence[RowReply]

    @property
    def has_answers(self) -> bool:
        """Whether at least one sample for this dataset row has an answer, whichever version sampled
        it."""
        return any(
            sample.text is not None
            for reply in self.replies
            for sample in (reply.greedy, *reply.samples)
        )

    @property
    def has_rewards(self) -> bool:
        """Whether at least one evaluated version has a reward for this dataset row."""
        return any(_scores(reply) is not None for reply in self.replies)

    @property
    def is_scored(self) -> bool:
        """Whether all evaluated versions have a reward for this dataset row."""
        return all(_scores(reply) is not None for reply in self.replies)

    @property
    def hook_hashes(self) -> set[str]:
        """Digests of the hook files that scored this dataset row. There are several digests if the
        files changed during the evaluation."""
        return {reply.hook_hash for reply in self.replies if reply.hook_hash is not None}

    @property
    def reason(self) -> str:
        """Reason why one of the evaluated versions has no reward for this dataset row."""
        reasons = [reply.reason for reply in self.replies if reply.reason is not None]
        return reasons[0] if reasons else "no sample at temperature 1 has a reward"


@dataclass(frozen=True)
class EvalReport:
    """The results of all rows, and the settings that are needed to interpret the results."""

    dataset: str
    """Name of the dataset's file."""
    eval_id: str
    num_samples: int
    declared_range: RewardRange
    declared_solved_at: float | None
    """Minimum reward with which a row counts as solved; None means the highest possible reward."""
    rows: Sequence[RowResult]

    @cached_property
    def scores(self) -> list[Scores]:
        """For each evaluated version, a dict from a dataset row's id to the row's rewards. Rows for
        which the version has no reward are left out."""
        num_versions = len(self.rows[0].replies)
        pairs = [
            [(row.task.task_id, _scores(row.replies[number])) for row in self.rows]
            for number in range(num_versions)
        ]
        return [
            {row_id: scores for row_id, scores in version if scores is not None}
            for version in pairs
        ]

    @cached_property
    def rewards(self) -> RewardRange:
        """The range of possible rewards, from which the confidence intervals of the report are
        computed."""
        return covering_range(self.declared_range, self.scores)

    @cached_property
    def solved_at(self) -> float:
        """Lowest reward with which a row counts as solved."""
        declared = self.declared_solved_at
        return self.rewards.high if declared is None else declared

    @cached_property
    def summaries(self) -> list[Summary]:
        """For each evaluated version, a summary of its rewards for the dataset rows."""
        return [summarize(scores, self.rewards) for scores in self.scores]

    @cached_property
    def comparisons(self) -> list[Comparison | None]:
        """For each evaluated version, the comparison of its rewards with those of the first
        version. It is None for the first version itself."""
        first, *others = self.scores
        return [None, *(compare(first, other, self.rewards) for other in others)]

    @property
    def labels(self) -> list[str]:
        """The name of each version in the tables, such as `12`. The name is a range, such as `12 to
        14`, if new weights were published while the rows were sampled."""
        num_versions = len(self.rows[0].replies)
        return [
            _label([row.replies[number] for row in self.rows]) for number in range(num_versions)
        ]

    @cached_property
    def unsolved(self) -> list[str]:
        """The ids of the rows that no sample of any version has solved. Rows without any reward are
        left out."""
        return unsolved_rows(self.scores, self.solved_at)

    @property
    def unscored(self) -> list[RowResult]:
        """The dataset rows for which at least one evaluated version has no reward."""
        return [row for row in self.rows if not row.is_scored]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        unsolved = set(self.unsolved)
        versions = [
            {
                "version": label,
                "rows": summary.num_rows,
                **_interval(summary.mean),
                "greedy": summary.greedy,
                "compared_with_first": None if comparison is None else _compared(comparison),
            }
            for label, summary, comparison in zip(
                self.labels, self.summaries, self.comparisons, strict=True
            )
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
                    "versions": [reply.model_dump(mode="json") for reply in row.replies],
                }
                for row in self.rows
            ],
        }


def _scores(reply: RowReply) -> RowScores | None:
    """Return the rewards of the samples in a reply, which is for one row and one version. Return
    None if no sample at temperature 1 has a reward."""
    rewards = [sample.reward for sample in reply.samples if sample.reward is not None]
    return RowScores(rewards, reply.greedy.reward) if rewards else None


def _label(replies: Sequence[RowReply]) -> str:
    """Return the version that sampled the rows, as text. If the server published new weights while
    rows were sampled, return the first and the last version. Return `?` if the server reported no
    version."""
    known = [
        version
        for reply in replies
        for version in (reply.first_version, reply.last_version)
        if version is not None
    ]
    if not known:
        return "?"
    first, last = min(known), max(known)
    return str(first) if first == last else f"{first} to {last}"


def _interval(interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {"mean": None, "low": None, "high": None}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _compared(comparison: Comparison) -> dict[str, Any]:
    return {
        "wins": comparison.wins,
        "losses": comparison.losses,
        "ties": comparison.ties,
        **_interval(comparison.difference),
    }
