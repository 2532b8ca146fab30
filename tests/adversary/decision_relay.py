"""A TCP relay between a proxy and its server. The relay can hold a request with a decision about a
version, so that a test can kill a process at this moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

LIMIT_S = 60.0
"""Maximum seconds for which the relay holds a request, so that no test hangs."""
CHUNK_BYTES = 65_536
DECISIONS = (b"POST /release ", b"POST /rollback ")
ROLLBACK = "rollback"
"""Name of the request that lets training go back. All other requests have the name of their
decision."""


class Side(StrEnum):
    """A moment of a decision."""

    BEFORE = "before the server has the request"
    DURING = "while the server carries it out"
    AFTER = "before the proxy has the reply"


@dataclass
class Stop:
    """A moment at which the relay holds a request or a reply until `release` is called."""

    decision: str
    side: Side
    reached: threading.Event = field(default_factory=threading.Event)
    is_dropped: bool = False
    """Whether the relay closes the connection after `release`, instead of relaying the held
    bytes."""
    _go: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float = LIMIT_S) -> None:
        assert self.reached.wait(timeout_s), f"no request {self.decision} within {timeout_s} s"

    def release(self, *, drop: bool = False) -> None:
        """End the hold. The relay then relays the held bytes, or closes the connection."""
        self.is_dropped = drop
        self._go.set()

    async def stand_still(self) -> None:
        """Report that the moment has come, and wait for `release`. Raises ConnectionError if
        `release` has decided to close the connection."""
        self.reached.set()
        await asyncio.to_thread(self._go.wait, LIMIT_S)
        if self.is_dropped:
            raise ConnectionAbortedError


class DecisionRelay:
    """The relay, in a thread. Use it as a context manager."""

    def __init__(self, port: int) -> None:
        """Create a relay to the server at this port."""
        self.url = ""
        self._port = port
        self._own_port = 0
        self._listener: asyncio.Server | None = None
        self._stop: Stop | None = None
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def stop_at(self, decision: str, side: Side) -> Stop:
        """Hold the next request with this decision."""
        self._stop = Stop(decision, side)
        return self._stop

    def refuse(self) -> None:
        """Refuse new connections, as the port of a server that has ended does."""
        asyncio.run_coroutine_threadsafe(self._refuse(), self._loop).result(LIMIT_S)

    def accept(self) -> None:
        """Accept new connections again."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(LIMIT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(LIMIT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stop is not None:
            self._stop.release(drop=True)
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        await self._listen()
        self._ready.set()
        await self._ended.wait()
        await self._refuse()
        # A connection that was just accepted is in the set only when its task has begun.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for connection in self._connections:
                connection.cancel()
            await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self._own_port)
            self._own_port = self._listener.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{self._own_port}"

    async def _refuse(self) -> None:
        if self._listener is None:
            return
        # A connection that was just accepted needs the open listener for one more turn of the event
        # loop. Up to Python 3.11, its socket would otherwise stay open.
        for listening in self._listener.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await asyncio.sleep(0)
        self._listener.close()
        self._listener = None

    async def _accept(self, near: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        async with contextlib.AsyncExitStack() as stack:
            # A cancelled task would be logged, up to Python 3.11.
            stack.enter_context(contextlib.suppress(asyncio.CancelledError))
            stack.callback(self._connections.discard, task)
            stack.push_async_callback(_close, reply)
            try:
                far, request = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                return
            stack.push_async_callback(_close, request)
            connection = _Connection(self)
            pumps = [
                asyncio.create_task(_pump(near, request, connection.on_request)),
                asyncio.create_task(_pump(far, reply, connection.on_reply)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    def take(self, decision: str) -> Stop | None:
        """Remove and return the stop for this decision."""
        stop = self._stop
        if stop is None or stop.decision != decision:
            return None
        self._stop = None
        return stop


class _Connection:
    """One connection of a client. Its requests follow one after another."""

    def __init__(self, relay: DecisionRelay) -> None:
        self._relay = relay
        self._stop: Stop | None = None
        """Stop at which the next reply is held."""

    async def on_request(self, read: Callable[[], Awaitable[bytes]], chunk: bytes) -> bytes:
        if not chunk.startswith(DECISIONS):
            return chunk
        while not _is_whole(chunk):
            chunk += await read()
        stop = self._relay.take(_decision_of(chunk))
        if stop is None:
            return chunk
        if stop.side is Side.BEFORE:
            await stop.stand_still()
        elif stop.side is Side.AFTER:
            self._stop = stop
        else:
            stop.reached.set()
        return chunk

    async def on_reply(self, read: Callable[[], Awaitable[bytes]], chunk: bytes) -> bytes:
        stop, self._stop = self._stop, None
        if stop is not None:
            await stop.stand_still()
        return chunk


def _is_whole(request: bytes) -> bool:
    """Return True if a request with a Content-Length is complete."""
    head, end, body = request.partition(b"\r\n\r\n")
    if not end:
        return False
    lines = head.lower().split(b"\r\n")
    (length,) = [line for line in lines if line.startswith(b"content-length:")]
    return len(body) >= int(length.partition(b":")[2])


def _decision_of(request: bytes) -> str:
    if request.startswith(b"POST /rollback "):
        return ROLLBACK
    return json.loads(request.partition(b"\r\n\r\n")[2])["decision"]


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    on_chunk: Callable[[Callable[[], Awaitable[bytes]], bytes], Awaitable[bytes]],
) -> None:
    """Relay the bytes from `reader` until one of the two sides is closed."""

    async def read() -> bytes:
        chunk = await reader.read(CHUNK_BYTES)
        if not chunk:
            raise ConnectionAbortedError
        return chunk

    try:
        while True:
            writer.write(await on_chunk(read, await read()))
            await writer.drain()
    except OSError:
        return
