"""The messages with which a proxy asks the server to forget groups: to delete their captured
calls."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

MAX_GROUPS = 1000
"""Maximum number of groups in one request."""
FORGOTTEN = "forgotten"
"""Reason for which a group that waits to be trained is dropped when it is forgotten."""


class ForgetGroupsRequest(BaseModel):
    """A request to delete the captured calls of groups. Groups that wait to be trained are dropped.
    A repeated request has no further effect."""

    run_id: str | None = Field(default=None, max_length=200)
    """Run that has the groups. If the server's current run is another one, the server refuses the
    request. None means the current run."""
    group_ids: list[Annotated[str, Field(min_length=1, max_length=300)]] = Field(
        max_length=MAX_GROUPS
    )


class ForgetGroupsReply(BaseModel):
    """The reply to ForgetGroupsRequest. On success, the groups' captured calls are deleted."""

    success: bool
    failure_reason: str = ""
    num_calls: int = 0
    """Number of captured calls that were deleted."""
    num_dropped: int = 0
    """Number of groups that waited to be trained, and were dropped."""
    checkpoint_step: int | None = None
    """Step of the checkpoint that was saved first, because a restart would otherwise have trained
    the groups again. None if no checkpoint was needed."""
    versions: list[int] = []
    """Versions of the weights whose training steps used the groups, oldest first. The run log may
    report such a step to the proxy only later."""
    sample_folders: list[str] = []
    """Folders on the server's machine that have tables of sampled answers. They may show texts of
    trained groups, and the server does not change them."""
