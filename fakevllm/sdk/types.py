"""Types for the authors of agents (workflow output and throttle policy), and the errors of the
SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fakevllm_adapters.http.validation_messages import one_line
from fakevllm_adapters.protocol import batch_status, swarm


class _OneLineErrors(BaseModel):
    """A base model with one-line errors. If a field is invalid, the constructor raises ValueError
    with a message of one line."""

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
    """The server refused a request. The message gives the server's reason. SwarmError is also the
    base class of the SDK's other errors."""

    def __init__(self, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status


class ServerUnreachable(SwarmError):
    """No server answered in time. The server may still have processed the request."""


class SwarmServerOfflineError(SwarmError):
    """The engine is off, but a client needs the engine. Somebody stopped the engine, or the engine
    could not be started."""


class EpisodeLost(SwarmError):
    """The episode is no longer claimed by this client. The server took the episode back because it
    was idle for too long. Another client may have claimed the episode since then.

    This run of the episode will not be trained. The agent can run the task again in a new episode.
    """


class ClientClosed(SwarmError):
    """The client was closed or its script ended. Therefore the called method of the client cannot
    begin, or cannot go on waiting."""
