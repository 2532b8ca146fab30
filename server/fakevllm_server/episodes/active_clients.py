"""The clients that take part in the batch being collected, and those that agreed to its step.

A client takes part once it has ended or aborted an episode that trains since the last step. A
client that was silent for IDLE_LIMIT_S is not waited for any more. It may still agree, because its
episodes are in the batch.

Pure; the clock is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

IDLE_LIMIT_S = 600.0
"""Seconds of silence after which a client that has not agreed is not waited for."""
MAX_SILENT = 20_000
"""Number of silent clients to remember. They are not waited for, and may agree."""


@dataclass(slots=True)
class Client:
    """A client that takes part in the current batch."""

    client_uuid: str
    last_activity: float
    has_agreed: bool = False


class ActiveClients:
    """Asks the clients of the current batch for their agreement to a step."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._silent: OrderedDict[str, None] = OrderedDict()
        """Clients that come back if they agree; oldest first."""

    def __iter__(self) -> Iterator[Client]:
        return iter(tuple(self._clients.values()))

    @property
    def any_agreed(self) -> bool:
        return any(client.has_agreed for client in self._clients.values())

    @property
    def all_agreed(self) -> bool:
        """Whether there are clients and each of them has agreed."""
        return bool(self._clients) and all(client.has_agreed for client in self._clients.values())

    def add(self, client_uuid: str, now: float) -> None:
        self._clients.setdefault(client_uuid, Client(client_uuid, now)).last_activity = now

    def restore(self, client_uuids: Iterable[str]) -> None:
        """Add the clients of waiting episodes from before a restart, as silent ones.

        They are not waited for: clients that are alive will end more episodes, and it is not known
        which of the others wanted to take part.
        """
        self._silent.update(dict.fromkeys(client_uuids))

    def touch(self, client_uuid: str, now: float) -> None:
        """Record a sign of life. It does not make a client take part."""
        client = self._clients.get(client_uuid)
        if client is not None:
            client.last_activity = now

    def agree(self, client_uuid: str, now: float) -> str | None:
        """Record a client's agreement; return a refusal in the protocol's words, or None."""
        if not client_uuid:
            return "client_uuid required"
        if client_uuid in self._silent:
            self.add(client_uuid, now)
        client = self._clients.get(client_uuid)
        if client is None:
            return (
                f"Client {client_uuid} is not in the active list -- it must have completed at "
                "least one rewarded (non-abort) episode since the last weight sync before agreeing."
            )
        client.has_agreed, client.last_activity = True, now
        return None

    def sweep(self, now: float) -> None:
        """Stop waiting for clients that have been silent for too long."""
        for client in self:
            if not client.has_agreed and now - client.last_activity > IDLE_LIMIT_S:
                del self._clients[client.client_uuid]
                self._silent[client.client_uuid] = None
        while len(self._silent) > MAX_SILENT:
            self._silent.popitem(last=False)

    def clear(self) -> None:
        """Forget all clients, because the batch was taken and the next one is empty."""
        self._clients.clear()
        self._silent.clear()
