"""Poll a swarm server for all data that the screen shows. The module `snapshot` turns the server's
replies into the data for the screen."""

from __future__ import annotations

import time
from typing import Protocol, Self, TypeVar

from pydantic import BaseModel, ValidationError

from fakevllm.overwatch.history import History
from fakevllm.overwatch.server_actions import NOT_FOUND, ServerAction
from fakevllm.overwatch.snapshot import Notice, Snapshot, away_snapshot, build_snapshot
from fakevllm.sdk import engine_control
from fakevllm.sdk.http_driver import AsyncHttpDriver, bare_url
from fakevllm.sdk.protocol import QUICK_TIMEOUT_S, ServerCall, ServerRequest, fetch
from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.swarm import LogReply

T = TypeVar("T")
UNAUTHORIZED = 401
NO_VALID_KEY = (
    "The server needs a valid API key: pass it with --key, or in the environment variable "
    "FAKEVLLM_SWARM_KEY."
)
NO_SWARM_SERVER = "The program at this URL is no swarm server: its replies have another format."


class NoticesReply(BaseModel):
    """The reply of `/get_verbose_logs`: the messages that clients sent with `push_verbose_log`, for
    everybody who watches the server."""

    class Entry(BaseModel):
        timestamp: float
        tag: str = ""
        message: str = ""

    entries: list[Entry] = []


class WatchedServer(Protocol):
    """A server that the screen shows and controls."""

    async def poll(self) -> Snapshot:
        """Return a snapshot of the server's current state. If the poll fails, raise no error, but
        return a snapshot that contains the reason."""
        ...

    async def perform(self, action: ServerAction) -> str:
        """Carry out `action` on the server, for example start the engine. Return a message for the
        user. Raises SwarmError if the action fails."""
        ...


class ServerPoller:
    """A WatchedServer that is polled over HTTP. It keeps the history of the run. Each poll
    therefore reads only the new entries of the run log, which is the server's record of its steps.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = bare_url(url)
        self._driver = AsyncHttpDriver(url, key)
        self._history = History()
        self._last: Snapshot | None = None

    async def poll(self) -> Snapshot:
        """Return a snapshot of the server's current state. If the poll fails, the snapshot has the
        state AWAY and contains the reason."""
        try:
            self._last = await self._driver.run(self._read_snapshot())
        except SwarmError as error:
            trouble = NO_VALID_KEY if error.status == UNAUTHORIZED else error.detail
            return away_snapshot(self._url, time.time(), trouble, self._last)
        except ValidationError:
            return away_snapshot(self._url, time.time(), NO_SWARM_SERVER, self._last)
        return self._last

    async def perform(self, action: ServerAction) -> str:
        """Carry out `action` on the server, for example start the engine. Return a message for the
        user. Raises SwarmError if the action fails."""
        try:
            return await self._driver.run(action.call())
        except ValidationError:
            raise SwarmError(NO_SWARM_SERVER) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._driver.close()

    def _read_snapshot(self) -> ServerCall[Snapshot]:
        status = yield from engine_control.status()
        pool = yield from none_if_not_found(engine_control.pool_information())
        yield from self._read_run_log(status.run_id)
        request = ServerRequest("/get_verbose_logs", timeout_s=QUICK_TIMEOUT_S)
        reply = yield from none_if_not_found(fetch(request, NoticesReply))
        entries = [] if reply is None else reply.entries
        notices = [Notice(entry.timestamp, entry.tag, entry.message) for entry in entries]
        return build_snapshot(self._url, time.time(), status, pool, self._history, notices)

    def _read_run_log(self, run_id: str) -> ServerCall[None]:
        """Read the new entries of the server's run log (its record of steps), page by page, and add
        them to the history.

        The first read of a long run takes many pages.
        """
        self._history = self._history.for_run(run_id)
        while True:
            request = ServerRequest(f"/get_run_log?after={self._history.last_seq}")
            reply = yield from none_if_not_found(fetch(request, LogReply))
            if reply is None or not reply.entries:
                return
            last_seq = self._history.last_seq
            self._history = self._history.with_entries(reply.entries)
            if self._history.last_seq == last_seq:
                return


def none_if_not_found(call: ServerCall[T]) -> ServerCall[T | None]:
    """Run a request to the server and return its result, or None if the server has no such route.

    Older servers lack some routes. The server of AgentJet (the framework that defined this
    protocol) lacks some routes too.
    """
    try:
        return (yield from call)
    except SwarmError as error:
        if error.status != NOT_FOUND:
            raise
        return None
