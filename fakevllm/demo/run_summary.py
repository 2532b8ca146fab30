"""The numbers of a finished demo run."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a finished run, as `--json` writes them."""

    before: float
    """Share of right answers in the probe before training."""
    after: float
    """Share of right answers in the probe after training."""
    policy_mean: list[float]
    """Mean reward of all scored siblings per step; index 0 is step 1. Tied groups count too. A
    group counts in the step that trained it, or otherwise in the step in which it ended."""
    returned_best: list[float | None]
    """Mean reward of the served answers per step; None for a step without a scored served answer.
    """
    steps: int
    requests: int
    """Number of groups in the ledger."""
    wall_s: float
    """Duration of this command in seconds."""
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
    """Number of groups in the steps of `policy_mean`."""
    groups_without_signal: int
    """Number of these groups whose rewards were all equal."""
    restarts: int
    """Number of restarts of the server and the proxy."""
    run_dir: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)
