"""What can go wrong between a client and its swarm server."""

from __future__ import annotations


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
