"""The arms of reinforcement learning, and the figures of a finished arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
HeldOutRewards = Mapping[str, Mapping[str, Sequence[float]]]
"""Rewards of the samples of each held-out question, by kind of task and by question."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What distinguishes an arm from the others."""

    num_siblings: int
    """Number of answers that are sampled to each question."""
    control: Literal["none", "frozen", "shuffled"]
    """Value of the job's key `control`: `frozen` makes no update, and `shuffled` permutes the
    rewards within each group. The model must not learn in these two arms."""


ARMS = {
    "frozen": Arm(8, "frozen"),
    "shuffled": Arm(8, "shuffled"),
    "n2": Arm(2, "none"),
    "n8": Arm(8, "none"),
}


@dataclass(frozen=True, slots=True)
class ArmRun:
    """The figures of a finished arm."""

    steps: int
    questions: int
    """Number of groups in these steps."""
    answers: int
    """Number of sampled answers in these groups."""
    updates: int
    """Number of steps that changed the weights."""
    is_complete: bool
    """Whether the arm took all its steps before the time limit."""
    start: HeldOutRewards
    end: HeldOutRewards
    """Rewards before and after training."""
    start_s: float
    """Seconds until server and proxy were ready."""
    train_s: float
    seconds: float


def held_out_rewards(report: Json, rows: Sequence[Json]) -> dict[str, dict[str, list[float]]]:
    """Return the rewards in a report of `fakevllm eval`. `rows` are the rows of the evaluated
    dataset. Greedy answers are left out."""
    kinds = {row["question"]: row["kind"] for row in rows}
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds.values()}
    for row in report["rows"]:
        samples = row["versions"][0]["samples"]
        rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
        found[kinds[row["question"]]][row["question"]] = rewards
    return found
