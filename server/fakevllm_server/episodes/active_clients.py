"""The clients that take part in the current batch. The module also records which of these clients
agree to train on the batch.

The agreement matters only if the job's sample-collection method starts training steps by agreement.
A training step of such a job starts when the clients have agreed.

A client takes part if it has ended or aborted a training episode since the last step. A client that
has sent no request for IDLE_LIMIT_S seconds is silent. The step does not wait for the agreement of
silent clients. A silent client may still agree, because its episodes are in the batch.

This module does no I/O, and gets the current time as an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

IDLE_LIMIT_S = 600.0
"""A client that has sent no request for this number of seconds is silent."""
MAX_SILENT = 20_000
"""Maximum number of silent clients that are remembered, so that they may still agree."""


@dataclass(slots=True)
class Client:
    """A client that takes part in the current batch: it has ended or aborted a training episode
    since the last step."""

    client_uuid: str
    last_activity: float
    has_agreed: bool = False


class ActiveClients:
    """The clients that take part in the current batch, and the clients that agreed to train on it.
    A client takes part if it has ended or aborted a training episode since the last step."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._silent: OrderedDict[str, None] = OrderedDict()
        """Uuids of silent clients. The client that has been silent longest is first."""

    def __iter__(self) -> Iterator[Client]:
        return iter(tuple(self._clients.values()))

    @property
    def any_agreed(self) -> bool:
        return any(client.has_agreed for client in self._clients.values())

    @property
    def all_agreed(self) -> bool:
        """True if at least one client takes part in the current batch, and every such client has
        agreed to train on it."""
        return bool(self._clients) and all(client.has_agreed for client in self._clients.values())

    def add(self, client_uuid: str, now: float) -> None:
        """Record that a client takes part in the current batch (the groups of the next training
        step), and that the client is active now."""
        self._clients.setdefault(client_uuid, Client(client_uuid, now)).last_activity = now

    def restore(self, client_uuids: Iterable[str]) -> None:
        """Add the clients of episodes that were ended before a restart of the server. These clients
        count as silent, so training steps do not wait for them. A client is no longer silent when
        it agrees to a step or ends another episode."""
        self._silent.update(dict.fromkeys(client_uuids))

    def touch(self, client_uuid: str, now: float) -> None:
        """Record `now` as the time of a client's latest request. Do nothing if the client takes no
        part in the current batch."""
        client = self._clients.get(client_uuid)
        if client is not None:
            client.last_activity = now

    def agree(self, client_uuid: str, now: float) -> str | None:
        """Record that a client agrees to train on the current batch, and return None. If the client
        takes no part in the batch or has no uuid, return the text of the refusal."""
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
        """Mark clients as silent if they have sent no request for IDLE_LIMIT_S seconds and have not
        agreed to train on the current batch. A training step does not wait for silent clients."""
        for client in self:
            if not client.has_agreed and now - client.last_activity > IDLE_LIMIT_S:
                del self._clients[client.client_uuid]
                self._silent[client.client_uuid] = None
        while len(self._silent) > MAX_SILENT:
            self._silent.popitem(last=False)

    def clear(self) -> None:
        """Forget all clients of the current batch, including silent ones. Call this method when a
        training step has taken the groups of the batch."""
        self._clients.clear()
        self._silent.clear()
