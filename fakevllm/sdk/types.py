"""What an agent's author writes out; a mistake in it is a ValueError of one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fakevllm_adapters.http.validation_messages import one_line
from fakevllm_adapters.protocol import pool, swarm


class _Given(BaseModel):
    if not TYPE_CHECKING:  # whose word for it is one argument a field

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                problems = one_line(error.errors(include_url=False))
                raise ValueError(f"{type(self).__name__}: {problems}") from None


class WorkflowOutput(_Given, swarm.WorkflowOutput):
    pass


class ThrottlePolicy(_Given, pool.ThrottlePolicy):
    model_config = ConfigDict(extra="forbid")


# What can go wrong between a client and its swarm server.


class SwarmError(RuntimeError):
    """The server refused something; its own words."""

    def __init__(self, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status


class ServerUnreachable(SwarmError):
    """Nobody answers, or not in time. What was asked may have been done."""


class SwarmServerOfflineError(SwarmError):
    """The engine was stopped while somebody waited for it."""


class EpisodeLost(SwarmError):
    """The claim is not this client's any more: it was idle for too long, or somebody else has it.
    Nothing of it will be trained; the task can be run again."""


class ClientClosed(SwarmError):
    """The client was closed, or its script ends, while somebody waited through it."""
