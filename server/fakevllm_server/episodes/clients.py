"""Who takes part in the batch that is being collected, and who has agreed to its step. Pure; the
clock is passed in.

A client takes part once it has ended an episode that trains, or aborted one, since the last step.
One that was silent for so long that nobody waits for it any more may still agree, as its episodes
are in the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

IDLE_LIMIT_S = 600.0
"""A client that was silent for so long, and has not agreed, is not waited for."""
MAX_SILENT = 20_000
"""Clients that are not waited for, and may agree."""


@dataclass(slots=True)
class Client:
    client_uuid: str
    last_activity: float
    has_agreed: bool = False


class ActiveClients:
    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._silent: OrderedDict[str, None] = OrderedDict()
        """They may come back, by agreeing; the oldest first."""

    def __iter__(self) -> Iterator[Client]:
        return iter(tuple(self._clients.values()))

    @property
    def any_agreed(self) -> bool:
        return any(client.has_agreed for client in self._clients.values())

    @property
    def all_agreed(self) -> bool:
        """Not where there are none."""
        return bool(self._clients) and all(one.has_agreed for one in self._clients.values())

    def entered(self, client_uuid: str, now: float) -> None:
        self._clients.setdefault(client_uuid, Client(client_uuid, now)).last_activity = now

    def restore(self, client_uuids: Iterable[str]) -> None:
        """Owners of episodes that wait since an earlier life. Those who live will end others, and
        whether one wanted no say is not known: they are not waited for."""
        self._silent.update(dict.fromkeys(client_uuids))

    def seen(self, client_uuid: str, now: float) -> None:
        """Any sign of life; it makes nobody a part."""
        client = self._clients.get(client_uuid)
        if client is not None:
            client.last_activity = now

    def agree(self, client_uuid: str, now: float) -> str | None:
        """Why that does not count, in the protocol's words; None where it does."""
        if not client_uuid:
            return "client_uuid required"
        if client_uuid in self._silent:
            self.entered(client_uuid, now)
        client = self._clients.get(client_uuid)
        if client is None:
            return (
                f"Client {client_uuid} is not in the active list -- it must have completed at "
                "least one rewarded (non-abort) episode since the last weight sync before agreeing."
            )
        client.has_agreed, client.last_activity = True, now
        return None

    def sweep(self, now: float) -> None:
        for client in self:
            if not client.has_agreed and now - client.last_activity > IDLE_LIMIT_S:
                del self._clients[client.client_uuid]
                self._silent[client.client_uuid] = None
        while len(self._silent) > MAX_SILENT:
            self._silent.popitem(last=False)

    def stepped(self) -> None:
        """The batch has been taken; the next one has nobody yet."""
        self._clients.clear()
        self._silent.clear()
