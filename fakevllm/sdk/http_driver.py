"""Drivers that run server calls (generators of requests, pauses and warnings). A driver sends the
requests with httpx, sleeps during the pauses, and logs the warnings at a limited rate. One driver
blocks the calling thread. The other driver is async."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import re
import ssl
import threading
import time
import weakref
from typing import Generic, TypeVar

import httpx
import orjson

from fakevllm.sdk.protocol import (
    Pause,
    ServerCall,
    ServerReply,
    ServerRequest,
    ThrottledWarning,
    normalized_server_url,
)
from fakevllm.sdk.types import ClientClosed, ServerUnreachable
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.swarm import CLIENT_HEADER
from fakevllm_runtime.log_throttle import LogThrottle

log = logging.getLogger("fakevllm.sdk")
T = TypeVar("T")
C = TypeVar("C")
Step = ServerRequest | Pause | ThrottledWarning
"""A value that a server call (a generator) yields to its driver."""

KEY_VARIABLE = "FAKEVLLM_SWARM_KEY"
MIN_LOGGED_WAIT_S = 5.0
"""Shortest wait, in seconds, that is logged. Every episode waits during a training step, and a
training step of a small model takes less than MIN_LOGGED_WAIT_S seconds."""
LOG_INTERVAL_S = 30.0
"""Seconds between log lines about the same wait."""
MAX_IDLE_S = 5.0
"""Seconds for which an idle HTTP client is kept. httpx keeps an idle connection for the same
time."""
_NUMBER = re.compile(r"\d+")


class HttpDriver:
    """A driver that runs server calls (generators of `ServerRequest` and `Pause` objects) in the
    caller's thread. It blocks this thread until the server call ends.

    Any number of threads may share one driver.

    Each request uses an httpx client of its own while it runs. A shared client would have two
    problems:

    * A thread could close a connection as surplus or expired just when another thread gets this
      connection for a request. The request would then fail with `Bad file descriptor`, or hang
      until its timeout.
    * Each request would examine all connections of the client, which is slow.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = normalized_server_url(url)
        self._headers = _headers(key)
        self._wait_log = WaitLog()
        self._pool = ConnectionPool[httpx.Client]()
        weakref.finalize(self, _close, self._pool)  # a script may drop its client without closing
        self._waits_ended = threading.Event()

    def run(self, call: ServerCall[T]) -> T:
        """Run a server call (a generator that yields requests and pauses), and return its result.

        Raises the errors that the call raises. Raises ClientClosed if `end_waits` is called before
        or during a pause of the call.
        """
        waited_s = 0.0
        try:
            step = next(call)
            while True:
                if isinstance(step, ThrottledWarning):
                    self._wait_log.warn(step)
                    step = call.send(None)
                elif isinstance(step, Pause):
                    waited_s += step.seconds
                    self._wait_log.pause(step, waited_s)
                    if self._waits_ended.wait(step.seconds):
                        raise ClientClosed("The client is closed.")
                    step = call.send(None)
                else:
                    step = _resume(call, self._send(step))
        except StopIteration as end:
            return end.value

    def _send(self, request: ServerRequest) -> ServerReply | ServerUnreachable:
        method, content, headers = _method_and_body(request)
        http = self._pool.take() or httpx.Client(
            base_url=self._url, headers=self._headers, verify=ssl_context(), trust_env=False
        )
        try:
            response = http.request(
                method, request.path, content=content, headers=headers, timeout=request.timeout_s
            )
        except httpx.HTTPError as error:
            return _unreachable(self._url, error)
        finally:
            for old in self._pool.put_back(http, time.monotonic()):
                old.close()
        return _parsed(response)

    def end_waits(self) -> None:
        """End the pauses of all running calls: a call raises ClientClosed during its current pause,
        or at its next pause. Requests can still be sent."""
        self._waits_ended.set()

    def close(self) -> None:
        self.end_waits()
        _close(self._pool)


class AsyncHttpDriver:
    """A driver that runs server calls (generators of `ServerRequest` and `Pause` objects) in one
    event loop. Each request uses an httpx client of its own while it runs."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = normalized_server_url(url)
        self._headers = _headers(key)
        self._wait_log = WaitLog()
        self._pool = ConnectionPool[httpx.AsyncClient]()

    async def run(self, call: ServerCall[T], is_cancelled: asyncio.Event | None = None) -> T:
        """Run a server call (a generator that yields requests and pauses), and return its result.

        Raises the errors that the call raises. Raises ClientClosed if `is_cancelled` is set before
        or during a pause of the call.
        """
        waited_s = 0.0
        try:
            step = next(call)
            while True:
                if isinstance(step, ThrottledWarning):
                    self._wait_log.warn(step)
                    step = call.send(None)
                elif isinstance(step, Pause):
                    waited_s += step.seconds
                    self._wait_log.pause(step, waited_s)
                    if await _is_set_within(step.seconds, is_cancelled):
                        raise ClientClosed("The call was cancelled.")
                    step = call.send(None)
                else:
                    step = _resume(call, await self._send(step))
        except StopIteration as end:
            return end.value

    async def _send(self, request: ServerRequest) -> ServerReply | ServerUnreachable:
        method, content, headers = _method_and_body(request)
        http = self._pool.take() or httpx.AsyncClient(
            base_url=self._url, headers=self._headers, verify=ssl_context(), trust_env=False
        )
        try:
            response = await http.request(
                method, request.path, content=content, headers=headers, timeout=request.timeout_s
            )
        except httpx.HTTPError as error:
            return _unreachable(self._url, error)
        finally:
            for old in self._pool.put_back(http, time.monotonic()):
                await old.aclose()
        return _parsed(response)

    async def close(self) -> None:
        for http in self._pool.close():
            await http.aclose()


class ConnectionPool(Generic[C]):
    """A pool of idle HTTP clients. A request takes a client, uses it and puts it back. Any thread
    may use the pool.

    The client that was put back last is taken first. Surplus clients therefore stay idle, and are
    closed after MAX_IDLE_S seconds. A forked process starts with an empty pool, because two
    processes cannot share a connection.
    """

    def __init__(self) -> None:
        self._is_closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: list[tuple[C, float]] = []
        """Pairs of a client and the time when it was put back. The client that has been idle
        longest comes first."""
        self._lock = threading.Lock()

    def take(self) -> C | None:
        """Take an idle HTTP client from the pool and return it. Return None if the pool is empty.
        The caller must then create an HTTP client.

        Raises ClientClosed if the pool is closed.
        """
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            if self._is_closed:
                raise ClientClosed("The client is closed.")
            return self._idle.pop()[0] if self._idle else None

    def put_back(self, client: C, now: float) -> list[C]:
        """Put an HTTP client back into the pool. Return a list of HTTP clients that the caller must
        close.

        The list contains the clients that were idle for more than MAX_IDLE_S seconds. This method
        removes these clients from the pool. If the pool is closed, `client` is not put back, and is
        the only item of the list.
        """
        with self._lock:
            if self._is_closed:
                return [client]
            self._idle.append((client, now))
            num_old = sum(now - since > MAX_IDLE_S for _, since in self._idle)
            old, self._idle = self._idle[:num_old], self._idle[num_old:]
            return [idle for idle, _ in old]

    def close(self) -> list[C]:
        """Close the pool, and return its idle HTTP clients. The caller must close these clients."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            return [client for client, _ in idle]


class WaitLog:
    """A rate limit for log lines about waits and repeated warnings, shared by all calls of one
    client.

    Hundreds of threads may wait for the same reason. A reason is logged at most once per
    LOG_INTERVAL_S seconds.
    """

    def __init__(self) -> None:
        self._throttle = LogThrottle(LOG_INTERVAL_S)

    def pause(self, pause: Pause, waited_s: float) -> None:
        if self.is_due(pause.reason, waited_s, time.monotonic()):
            log.info("waiting: %s", pause.reason)

    def warn(self, warning: ThrottledWarning) -> None:
        if self.is_due(warning.kind, math.inf, time.monotonic()):
            log.warning("%s", warning.text)

    def is_due(self, reason: str, waited_s: float, now: float) -> bool:
        """Return True if a log line with this reason should be written now. `waited_s` is the total
        number of seconds for which the call has waited so far. Short waits are not logged.

        Two reasons count as equal if they differ only in numbers, because a number in the reason
        may change while the call waits. Equal reasons are logged at most once per interval.
        """
        if waited_s < MIN_LOGGED_WAIT_S:
            return False
        return self._throttle.due(_NUMBER.sub("N", reason), now) is not None


def bare_url(url: str) -> str:
    """Return a server's URL without credentials (the user name and the key before the host).

    Agents and error messages get this URL. Agents need no credentials in the URL, because they use
    the API key of their episode. Readers of error messages must not learn the client's key.
    """
    return str(httpx.URL(url).copy_with(userinfo=b"")).rstrip("/")


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """Return the TLS context that all HTTP clients share. The context is created only once. To
    create a context, the certificates must be read, which takes 20 ms of CPU time. Without a shared
    context, this time would be most of the cost of an HTTP client."""
    return httpx.create_ssl_context()


async def _is_set_within(seconds: float, event: asyncio.Event | None) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await (event or asyncio.Event()).wait()
    except TimeoutError:
        return False
    return True


def _close(pool: ConnectionPool[httpx.Client]) -> None:
    for http in pool.close():
        http.close()


def _resume(call: ServerCall[T], result: ServerReply | ServerUnreachable) -> Step:
    return call.throw(result) if isinstance(result, ServerUnreachable) else call.send(result)


def _headers(key: str | None) -> dict[str, str]:
    return bearer_header(key or os.environ.get(KEY_VARIABLE)) | {CLIENT_HEADER: "1"}


def _method_and_body(request: ServerRequest) -> tuple[str, bytes | None, dict[str, str]]:
    if request.body is None:
        return "GET", None, {}
    return "POST", orjson.dumps(request.body), {"Content-Type": "application/json"}


def _parsed(response: httpx.Response) -> ServerReply:
    try:
        return ServerReply(response.status_code, orjson.loads(response.content))
    except orjson.JSONDecodeError:
        return ServerReply(response.status_code, response.text)


def _unreachable(url: str, error: httpx.HTTPError) -> ServerUnreachable:
    cause = str(error) or type(error).__name__
    return ServerUnreachable(f"No swarm server answers at {bare_url(url)} ({cause})")
