"""The request of `fakevllm forget` to a running proxy, and the report about the groups that were
forgotten (deleted)."""

from __future__ import annotations

from pydantic import BaseModel, Field

from fakevllm.ledger.forgotten_groups import Target, TargetKind

PATH = "/fakevllm/forget"


class TargetMessage(BaseModel):
    """A choice of groups to forget (delete), as a part of a ForgetRequest. A group is a request
    with the answers that were sampled for it."""

    kind: TargetKind
    value: str = Field(min_length=1, max_length=500)

    def target(self) -> Target:
        return Target(self.kind, self.value)


class ForgetRequest(BaseModel):
    """Body of POST /fakevllm/forget, which asks the proxy to forget (delete) groups."""

    ledger: str
    """Absolute path of the ledger file. A proxy with another ledger refuses the request."""
    targets: list[TargetMessage]


class TrainedVersion(BaseModel):
    """A version of the weights that was trained on a forgotten group."""

    run_id: str | None
    version: int


class ForgetReport(BaseModel):
    """The report about the groups that were forgotten (deleted), and about those that could not be
    forgotten yet."""

    refusal: str = ""
    """Reason why nothing was forgotten; empty if there is none."""
    num_found: int = 0
    """Number of groups of the targets, including groups that were forgotten before."""
    num_forgotten: int = 0
    """Number of groups whose contents were deleted now."""
    num_in_flight: int = 0
    """Number of groups that are left, because the server has not acknowledged their rewards."""
    num_open: int = 0
    """Number of requests that were still being answered when the wait for them ended."""
    versions: list[TrainedVersion] = []
    """Versions that were trained on the groups, oldest first."""
    num_calls: int = 0
    """Number of captured calls that the server deleted."""
    num_dropped: int = 0
    """Number of groups that waited at the server to be trained, and were dropped."""
    checkpoint_steps: list[int] = []
    """Steps of the checkpoints that the server saved first."""
    sample_folders: list[str] = []
    """Folders of the server whose tables of sampled answers may still show the texts."""
    server_problem: str = ""
    """Reason why the server has not deleted all calls; empty if it has."""
    num_unsent: int = 0
    """Number of these groups whose calls the server has yet to delete."""
    is_log_truncated: bool = True
    """Whether the ledger's write-ahead log was truncated, so that it has no deleted bytes."""
