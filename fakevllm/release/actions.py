"""The actions that the release gate can have to do next. `controller` and `between_steps` choose
the action, and `gate/release_gate` carries the action out."""

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
    """A decision that must be sent to the server."""

    id: str
    """Id of the request. The id stays the same until the history changes, even if a new version
    appears while the request is sent again."""
    decision: Decision
    version: int | None
    """Version that is released, rejected or left undecided. None if the decision makes the server's
    newest version the candidate."""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def source(self) -> str | None:
        """Test from which the decision follows, LIVE or HELD_OUT. None if the decision makes a
        version the candidate."""
        return self.evidence.get("source")


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Held-out rows that must be sampled for an evaluation. The candidate and the released version
    answer the rows. If there is a reference, only the candidate answers, because the reference
    already has the released version's answers."""

    candidate: int
    released: int
    draw: int
    """Number of the first draw, from 0."""
    num_draws: int = 1
    """Number of draws, which are sampled at the same time."""


@dataclass(frozen=True, slots=True)
class SampleReference:
    """Held-out rows that the served version must answer for the reference. The served version has
    the released weights."""

    reference: str
    """Name of the reference."""
    draw: int
    """Number of the first draw, from 0."""
    num_draws: int


@dataclass(frozen=True, slots=True)
class LimitTraining:
    """A limit of training that must be sent to the server: the newest version that training may
    make."""

    version: int


@dataclass(frozen=True, slots=True)
class Wait:
    """No action is due before the next event."""


Action = Decide | Evaluate | SampleReference | LimitTraining | Wait
