"""The results of a finished demo run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fakevllm.demo.gated_outcome import GatedOutcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a finished demo run. `fakevllm demo --json FILE` writes these fields to a
    file."""

    before: float
    """Share of right answers in the probe before training."""
    after: float
    """Share of right answers in the probe after training."""
    policy_mean: list[float]
    """Mean reward of all scored siblings (sampled answers) for each step. Index 0 is step 1. A
    group (a request with its siblings) counts in the step that trained it. A group that no step
    trained counts in the step during which it ended. Groups whose rewards are all equal count too.
    """
    returned_best: list[float | None]
    """Mean reward of the served answers for each step; None for a step in which no served answer
    was scored."""
    steps: int
    requests: int
    """Number of groups (requests with their sampled answers) in the ledger."""
    wall_s: float
    """Duration of this command in seconds."""
    seed: int
    control: str
    lockstep: bool
    async_steps: int
    """Number of batches that were collected ahead of the running training step."""
    rollout: str
    """Name of the engine that sampled."""
    trainer: str
    """Name of the engine that trained."""
    groups: dict[str, int]
    """Number of groups by their state in the ledger."""
    groups_in_steps: int
    """Number of groups that `policy_mean` is computed from."""
    groups_without_signal: int
    """Number of groups in `groups_in_steps` whose rewards were all equal."""
    restarts: int
    """Number of times that the server or the proxy was restarted after it had died."""
    run_dir: str
    gated: GatedOutcome | None = None
    """Results of a demo with the mode `gated`. Without this mode, the value is None, and the file
    does not have the field."""

    @property
    def failed_claims(self) -> list[str]:
        """The demo's claims about its planted steps (which train with inverted rewards) that are
        false for this run, as texts."""
        planted = None if self.gated is None else self.gated.planted
        return (
            [] if planted is None else [name for name, holds in planted.claims.items() if not holds]
        )

    def as_json(self) -> dict[str, object]:
        fields = asdict(self)
        if self.gated is None:
            del fields["gated"]
        return fields
