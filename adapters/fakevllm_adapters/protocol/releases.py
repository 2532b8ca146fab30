"""The messages about releases: which version of the weights may answer apps, and who decided it.

The proxy evaluates versions and decides. The server keeps the decisions in its journal, so that
they survive the end of either process, and carries out what they mean for training: it keeps the
checkpoints that are needed, and restores the released version when a newer one is rejected.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field

from fakevllm_adapters.protocol.swarm import SuccessReply


class Decision(StrEnum):
    """A decision about a version, or about all releases.

    candidate  The version is being evaluated. Its checkpoint is saved and kept.
    released   The version passed, and answers apps from now on.
    rejected   The version is worse. It never answers an app again, and training goes back to the
               released version.
    undecided  The evaluation ended without a verdict. The released version stays.
    hold       No version becomes a candidate, and none is released, until `resume`.
    resume     The end of a hold.
    """

    CANDIDATE = "candidate"
    RELEASED = "released"
    REJECTED = "rejected"
    UNDECIDED = "undecided"
    HOLD = "hold"
    RESUME = "resume"


GATE = "gate"
"""Value of `decided_by` for decisions that no operator made."""


MAX_PINNED = 16
"""Maximum number of versions that a decision may name to be kept. A checkpoint takes the space of
the weights and the optimizer."""


class ReleaseRequest(BaseModel):
    """A decision of the proxy or of an operator (`POST /release`). A request with the id of an
    earlier one changes nothing, and gets the same reply."""

    id: str = Field(min_length=1, max_length=200)
    decision: Decision
    version: int | None = Field(default=None, ge=0)
    """Version that is decided about. None for a hold and for its end, and for the candidate `the
    newest version`, which the reply then names."""
    evidence: dict[str, Any] = Field(default_factory=dict)
    """Figures on which the decision is based: the difference of the mean rewards to the released
    version with its interval, the number of pairs, and the margin."""
    force: bool = False
    """Whether a version that was rejected may be released all the same."""
    pinned: list[int] = Field(default_factory=list[int], max_length=MAX_PINNED)
    """Further versions whose checkpoints are kept, such as the baseline, until a later decision
    names others, or a gate names none."""


class RollbackRequest(BaseModel):
    """The request that training goes back to a version (`POST /rollback`). All versions that
    descend from it are rejected. A request with the id of an earlier one changes nothing."""

    id: str = Field(min_length=1, max_length=200)
    version: int | None = Field(default=None, ge=0)
    """Version whose weights and optimizer are restored; None for the released version."""
    evidence: dict[str, Any] = Field(default_factory=dict)


class ReleaseRecord(BaseModel):
    """One entry of the history of releases."""

    number: int
    """Position in the history, from 1."""
    id: str
    decision: Decision
    version: int | None
    parent: int | None
    """Version from which the version's training began: the one that was restored last before it,
    or 0."""
    time_s: float
    """Unix time in seconds."""
    decided_by: str
    """GATE, or the name of the operator's key."""
    evidence: dict[str, Any] = Field(default_factory=dict)


class ReleaseReply(SuccessReply):
    """The reply to a decision or a rollback."""

    record: ReleaseRecord | None = None
    """The new entry of the history, or the one that an earlier request with this id made; None
    without success."""


class ReleasesReply(BaseModel):
    """The history of releases (`GET /releases`), and what follows from it."""

    records: list[ReleaseRecord]
    """All entries, oldest first."""
    released: int
    """Version that answers apps; 0 before the first release."""
    candidate: int | None
    """Version that is being evaluated."""
    rejected: list[int]
    """Versions that must not answer apps: those that were rejected, and those that descend from
    one of them."""
    is_held: bool
