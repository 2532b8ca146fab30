"""The numbers of a finished demo run."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a finished run, as `--json` writes them."""

    before: float
    after: float
    policy_mean: list[float]
    """Mean reward of all scored siblings per step; index 0 is step 1. Tied groups count too. A
    group counts in the step that trained it, or otherwise in the step in which it ended."""
    returned_best: list[float | None]
    """Mean reward of the served answers per step; None for a step without a scored served answer.
    """
    steps: int
    requests: int
    wall_s: float
    seed: int
    control: str
    lockstep: bool
    rollout: str
    """The engine that sampled."""
    trainer: str
    """The engine that trained."""
    groups: dict[str, int]
    """Number of groups by their state in the ledger."""
    groups_in_steps: int
    groups_without_signal: int
    restarts: int
    run_dir: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)
