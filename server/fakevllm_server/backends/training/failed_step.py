"""Distinguish a failed training step that changed no weights from a failed step that changed some
weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fakevllm_server.types.backend import BackendError


class PartialStep(BackendError):
    """A step failed after it had begun to change the weights. The weights are now those of no
    complete step."""


class UpdateTracker:
    """Records whether a step has begun to change weights."""

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        """Record that an update begins. Call it before the update, because an update that fails may
        have changed some weights."""
        self.has_begun = True


@contextmanager
def partial_step_guard() -> Generator[UpdateTracker]:
    """Guard a step: an exception after the step's first update is raised as PartialStep."""
    updates = UpdateTracker()
    try:
        yield updates
    except Exception as error:
        if not updates.has_begun:
            raise
        raise PartialStep(
            f"failed after an update was made: {type(error).__name__}: {error}"
        ) from error
