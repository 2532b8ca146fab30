"""Distinguish two kinds of failed training steps: steps that changed no weights, and steps that may
have changed weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fakevllm_server.types.backend import BackendError


class PartialStep(BackendError):
    """Raised if a training step fails after it has begun to change the weights. The weights may
    then be a mixture: neither the weights before the step nor the weights after a complete step."""


class UpdateTracker:
    """Records whether a training step has begun to change the weights."""

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        """Record that an update of the weights begins. Call this method before the update. A failed
        update may have changed some weights."""
        self.has_begun = True


@contextmanager
def partial_step_guard() -> Generator[UpdateTracker]:
    """Context manager in which a training step runs. If an exception occurs after the step has
    begun to change the weights, PartialStep is raised in its place."""
    updates = UpdateTracker()
    try:
        yield updates
    except Exception as error:
        if not updates.has_begun:
            raise
        raise PartialStep(
            f"failed after an update was made: {type(error).__name__}: {error}"
        ) from error
