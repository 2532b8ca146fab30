"""Asks a server for all that a snapshot is made of. Thin: what it means stands in `snapshot.py`."""

from __future__ import annotations

import time
from typing import Protocol, Self, TypeVar

from pydantic import BaseModel, ValidationError

from fakevllm.overwatch.acts import NOT_FOUND, Act
from fakevllm.overwatch.history import History
from fakevllm.overwatch.snapshot import Notice, Snapshot, away, taken
from fakevllm.sdk import batch_calls, engine_calls
from fakevllm.sdk.http_driver import AsyncHttpDriver, bare_url
from fakevllm.sdk.protocol import QUICK_TIMEOUT_S, ServerCall, ServerRequest, fetch
from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.swarm import LogReply

T = TypeVar("T")
UNAUTHORIZED = 401
KEYLESS = "This server asks for a good key: give one with --key, or in FAKEVLLM_SWARM_KEY."
STRANGER = "What answers there is no swarm server: its replies are of another kind."


class NoticesReply(BaseModel):
    class Entry(BaseModel):
        timestamp: float
        tag: str = ""
        message: str = ""

    entries: list[Entry] = []


class Watched(Protocol):
    """A server that is looked at."""

    async def look(self) -> Snapshot: ...

    async def do(self, act: Act) -> str:
        """What to tell. Raises SwarmError."""
        ...


class Poll:
    def __init__(self, url: str, key: str | None) -> None:
        self._url = bare_url(url)
        self._driver = AsyncHttpDriver(url, key)
        self._history = History()
        self._last: Snapshot | None = None

    async def look(self) -> Snapshot:
        """Never raises: a server that does not answer is what is seen."""
        try:
            self._last = await self._driver.run(self._seen())
        except SwarmError as error:
            why = KEYLESS if error.status == UNAUTHORIZED else error.detail
            return away(self._url, time.time(), why, self._last)
        except ValidationError:
            return away(self._url, time.time(), STRANGER, self._last)
        return self._last

    async def do(self, act: Act) -> str:
        try:
            return await self._driver.run(act.talk())
        except ValidationError:
            raise SwarmError(STRANGER) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._driver.close()

    def _seen(self) -> ServerCall[Snapshot]:
        status = yield from engine_calls.status()
        batch = yield from _if_told(batch_calls.pool_information())
        yield from self._follow(status.run_id)
        quick = ServerRequest("/get_verbose_logs", timeout_s=QUICK_TIMEOUT_S)
        told = yield from _if_told(fetch(quick, NoticesReply))
        notices = [
            Notice(one.timestamp, one.tag, one.message) for one in (told.entries if told else [])
        ]
        return taken(self._url, time.time(), status, batch, self._history, notices)

    def _follow(self, run_id: str) -> ServerCall[None]:
        """To the end of the log, page by page; a long run's first look takes a while."""
        self._history = self._history.of_run(run_id)
        while True:
            ask = ServerRequest(f"/get_run_log?after={self._history.last_seq}")
            reply = yield from _if_told(fetch(ask, LogReply))
            if reply is None or not reply.entries:
                return
            before = self._history.last_seq
            self._history = self._history.followed(reply.entries)
            if self._history.last_seq == before:
                return


def _if_told(talk: ServerCall[T]) -> ServerCall[T | None]:
    """None where the server has no such route: not every server has all of ours."""
    try:
        return (yield from talk)
    except SwarmError as error:
        if error.status != NOT_FOUND:
            raise
        return None
