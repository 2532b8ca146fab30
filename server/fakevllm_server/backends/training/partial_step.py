"""Tells a training step that changed nothing from one that failed with the weights half way."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fakevllm_server.types.backend import BackendError


class PartialStep(BackendError):
    """A step failed after it began to change weights: they are now those of no step."""


class UpdateTracker:
    """Of one step."""

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        """Call it before an update, not after: one that fails may have moved some weights."""
        self.has_begun = True


@contextmanager
def partial_step_guard() -> Generator[UpdateTracker]:
    """Around a step. Whatever fails after its first update is raised as PartialStep."""
    updates = UpdateTracker()
    try:
        yield updates
    except Exception as error:
        if not updates.has_begun:
            raise
        raise PartialStep(
            f"failed after an update was made: {type(error).__name__}: {error}"
        ) from error
