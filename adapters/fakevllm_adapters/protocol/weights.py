"""The server's message about one version of the weights."""

from __future__ import annotations

from pydantic import BaseModel


class WeightsReply(BaseModel):
    """The server's reply about one version of the weights of its current run."""

    run_id: str
    version: int
    engine: str
    """Name of the engine that samples: `vllm`, `embedded` or `fake`."""
    digest: str | None = None
    """SHA-256 of the version's checkpoint, with which the server checks the files before it reads
    them. None for a version without a checkpoint."""
    checkpoint_step: int | None = None
    """Step after which the checkpoint was saved; None if there is no checkpoint."""
