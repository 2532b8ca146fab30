"""The types that an agent's author creates, and the errors of the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fakevllm_adapters.http.validation_messages import one_line
from fakevllm_adapters.protocol import batch_status, swarm


class _OneLineErrors(BaseModel):
    """A model whose constructor raises ValueError with a one-line message for invalid fields."""

    if not TYPE_CHECKING:  # type checkers derive the arguments from the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                problems = one_line(error.errors(include_url=False))
                raise ValueError(f"{type(self).__name__}: {problems}") from None


class WorkflowOutput(_OneLineErrors, swarm.WorkflowOutput):
    pass


class ThrottlePolicy(_OneLineErrors, batch_status.ThrottlePolicy):
    model_config = ConfigDict(extra="forbid")


class SwarmError(RuntimeError):
    """The server refused a request. The error has the server's message."""

    def __init__(self, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status


class ServerUnreachable(SwarmError):
    """No server answered in time. The server may have processed the request nevertheless."""


class SwarmServerOfflineError(SwarmError):
    """The engine was stopped while a client waited for it."""


class EpisodeLost(SwarmError):
    """The episode is no longer claimed by this client: it was idle for too long, or another client
    has claimed it.

    This run of the episode will not be trained. The task can be run again.
    """


class ClientClosed(SwarmError):
    """The client was closed, or its script ended, while a method of the client waited."""
