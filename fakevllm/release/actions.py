"""The possible next actions of the release gate. The modules `controller` and `between_steps`
choose an action, and the module `gate.release_gate` carries the action out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fakevllm_adapters.protocol.releases import Decision

LIVE = "live"
"""Source of decisions that follow from live sessions."""
HELD_OUT = "held_out"
"""Source of decisions that follow from held-out rows."""


@dataclass(frozen=True, slots=True)
class Decide:
    """The release gate's action to send a decision about a version to the server."""

    id: str
    """Id of the request that sends the decision. The id changes only when the server's history of
    releases changes. A retry of the request therefore has the same id, even if a new version has
    appeared in the meantime."""
    decision: Decision
    version: int | None
    """Version that is released, rejected or left undecided. None if the decision makes the server's
    newest version the candidate (the version that is evaluated next)."""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def source(self) -> str | None:
        """Source of the evidence for the decision: LIVE (results of apps' sessions) or HELD_OUT
        (answers to held-out rows). None if the decision only makes a version the candidate (the
        next version to evaluate)."""
        return self.evidence.get("source")


@dataclass(frozen=True, slots=True)
class Evaluate:
    """The release gate's action to sample held-out rows for an evaluation. The candidate and the
    released version answer the rows. If there is a reference (stored answers of the released
    version), only the candidate answers the rows."""

    candidate: int
    released: int
    draw: int
    """Number of the first drawn row. The draws of an evaluation are numbered from 0."""
    num_draws: int = 1
    """Number of drawn rows to sample at the same time."""


@dataclass(frozen=True, slots=True)
class SampleReference:
    """The release gate's action to let the served version answer held-out rows, while it has the
    released weights. The answers become the reference, with which candidates are compared later."""

    reference: str
    """Name of the reference."""
    draw: int
    """Number of the first drawn row. The draws of the reference are numbered from 0."""
    num_draws: int
    """Number of drawn rows to sample at the same time."""


@dataclass(frozen=True, slots=True)
class LimitTraining:
    """The release gate's action to send a limit on training to the server. `version` is the newest
    version that training may make."""

    version: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The release gate's action to do nothing until the next event."""


Action = Decide | Evaluate | SampleReference | LimitTraining | Wait
