"""The numbers of a finished demo."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a finished run, as `--json` writes them."""

    before: float
    after: float
    policy_mean: list[float]
    """[s]: mean reward of all scored siblings of the groups of step s + 1, ties included. A group
    counts to the step that trained it, or else in which it ended."""
    returned_best: list[float | None]
    """[s]: mean reward of what the users got in step s + 1; None where none of it was scored."""
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
    """By state in the ledger."""
    groups_in_steps: int
    groups_without_signal: int
    restarts: int
    run_dir: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)
