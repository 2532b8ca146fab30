"""The messages about releases. A release decides which version of the weights may answer apps.

The proxy evaluates versions and makes decisions. The server keeps the decisions in its journal, so
that the decisions survive the end of either process. The server also carries the decisions out in
training. The server keeps the required checkpoints, and restores the released version when a newer
version is rejected.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field, field_validator

from fakevllm_adapters.protocol.swarm import SuccessReply


class Decision(StrEnum):
    """A decision about a version, or about all releases.

    candidate  The version is being evaluated. Its checkpoint is saved and kept.
    released   The version passed its evaluation, and answers apps from now on.
    rejected   The version is worse than the released version. It never answers an app again, and
               training goes back to the released version.
    undecided  The evaluation ended without a verdict. The released version stays.
    hold       Until `resume`, no version becomes a candidate, and no version is released.
    resume     The hold ends.
    """

    CANDIDATE = "candidate"
    RELEASED = "released"
    REJECTED = "rejected"
    UNDECIDED = "undecided"
    HOLD = "hold"
    RESUME = "resume"


GATE = "gate"
"""Value of `decided_by` for decisions of the proxy's release gate."""
GUARD = "guard"
"""Value of `decided_by` for decisions of the proxy's guard, which notices when training goes
wrong."""
AUTOMATIC = (GATE, GUARD)
"""Values of `decided_by` for decisions that no operator made. The id of such a decision begins with
one of these words and a hyphen."""


MAX_PINNED = 16
"""Maximum number of further versions whose checkpoints one decision may ask to keep. Each
checkpoint takes the space of the weights and the optimizer."""


MAX_EVIDENCE_BYTES = 65_536
"""Maximum size of a decision's evidence as JSON."""


class DecisionRequest(BaseModel):
    """The common fields of all requests that decide about versions of the weights. If an earlier
    request had the same id, the request changes nothing, and gets the reply to the earlier request.
    """

    id: str = Field(min_length=1, max_length=200)
    run_id: str | None = Field(default=None, max_length=200)
    """Id of the run to which the version belongs. Each run numbers its versions from 0. If the
    server's current run is another one, the server refuses the request. None means the current
    run."""
    evidence: dict[str, Any] = Field(default_factory=dict)
    """Figures on which the decision is based: the mean reward of the version minus that of the
    released version, the confidence interval of this difference, the number of pairs of rewards
    that were compared, and the margin. The server adds the key `restored`."""

    @field_validator("evidence")
    @classmethod
    def _check_evidence(cls, evidence: dict[str, Any]) -> dict[str, Any]:
        if "restored" in evidence:
            raise ValueError("`restored` is set by the server: leave it out")
        if len(json.dumps(evidence, default=str)) > MAX_EVIDENCE_BYTES:
            raise ValueError(f"evidence is larger than {MAX_EVIDENCE_BYTES} bytes: send less")
        return evidence


class ReleaseRequest(DecisionRequest):
    """A request with a decision about releases, from the proxy or an operator (`POST /release`)."""

    decision: Decision
    version: int | None = Field(default=None, ge=0)
    """Version about which the decision is made. None for the decisions `hold` and `resume`, which
    concern no version. For the decision `candidate`, None means the newest version; the reply then
    contains the version's number."""
    force: bool = False
    """Whether a version that was rejected may be released all the same."""
    pinned: list[int] | None = Field(default=None, max_length=MAX_PINNED)
    """Further versions whose checkpoints are kept, such as the baseline. The list is valid until a
    later decision has another list. None means that the earlier list stays valid. A version that
    does not exist yet is kept from its first checkpoint on."""


class RollbackRequest(DecisionRequest):
    """A request to return the training to an earlier version (`POST /rollback`). All versions that
    were trained from this earlier version are rejected."""

    version: int | None = Field(default=None, ge=0)
    """Version whose weights and optimizer are restored; None for the released version."""


class TrainingLimitRequest(BaseModel):
    """A request to pause the training when it has reached a version (`POST /training_limit`). The
    request replaces the limit that was set before."""

    version: int | None = Field(default=None, ge=0)
    """Newest version that training may make. While the served version is this version or a newer
    one, no step begins. None means no limit."""
    run_id: str | None = Field(default=None, max_length=200)
    """Id of the run whose training is limited. If the server's current run is another one, the
    server refuses the request. None means the current run."""


class ReleaseRecord(BaseModel):
    """One entry of the history of releases: a decision, with its time and its evidence."""

    number: int
    """Position in the history, from 1."""
    id: str
    decision: Decision
    version: int | None
    parent: int | None
    """Version from which training led to `version`. It is the version that was restored last before
    `version` was trained. If no version was restored before, it is 0, the initial model."""
    time_s: float
    """Unix time in seconds."""
    decided_by: str
    """GATE, GUARD, or the name of the operator's key."""
    evidence: dict[str, Any] = Field(default_factory=dict)


class ReleaseReply(SuccessReply):
    """The reply to a ReleaseRequest (a decision) or a RollbackRequest."""

    record: ReleaseRecord | None = None
    """The new entry of the history. If an earlier request had the same id, it is the entry of that
    earlier request. None if the request failed."""


class ReleasesReply(BaseModel):
    """The history of releases, and the state that follows from the history (`GET /releases`)."""

    run_id: str | None = None
    """Id of the run to which the versions belong."""
    records: list[ReleaseRecord]
    """All entries, oldest first."""
    released: int
    """Version that answers apps; 0 before the first release."""
    candidate: int | None
    """Version that is being evaluated."""
    rejected: list[int]
    """Versions that must not answer apps: the versions that were rejected, and the versions that
    descend from a rejected version."""
    is_held: bool
    training_limit: int | None = None
    """Newest version that training may make; None without a limit."""
    released_copies: list[int] = []
    """Versions that have exactly the weights of the released one, ascending: the released version
    itself, and the versions that were made by restoring it. Empty if the server is too old to list
    them."""
    newest_copies: list[int] = []
    """Versions that have exactly the newest weights, ascending."""
    with_weights: list[int] = []
    """Versions whose weights the server has, ascending: 0, the model before any training, and the
    versions with a checkpoint. Only these can be released, or be the target of a rollback. Empty if
    the server is too old to list them."""
