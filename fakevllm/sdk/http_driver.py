"""Carries talks out: requests over httpx, pauses by the clock. One driver for threads, one for an
event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import threading
import time
import weakref
from typing import TypeVar

import httpx
import orjson

from fakevllm.runtime.log_throttle import LogThrottle
from fakevllm.sdk.access import EpisodeAccess, trusted
from fakevllm.sdk.connection_pool import Spare
from fakevllm.sdk.episode_calls import Claim
from fakevllm.sdk.protocol import Answer, Ask, Pause, Remark, Talk, server_url
from fakevllm.sdk.types import ClientClosed, ServerUnreachable
from fakevllm_adapters.protocol.keys import bearer_header

log = logging.getLogger("fakevllm.sdk")
T = TypeVar("T")

KEY_VARIABLE = "FAKEVLLM_SWARM_KEY"


class Driver:
    """For threads: any number of them may drive talks at once.

    Each request has an HTTP client to itself meanwhile. In a pool that is shared httpcore closes
    connections that look idle (too many, too old) while it hands them to another request, which
    then fails with `Bad file descriptor` or waits until its time is over; and each request looks
    at every connection.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = server_url(url)
        self._headers = _headers(key)
        self._waits = Waits()
        self._spare = Spare[httpx.Client]()
        weakref.finalize(self, _close, self._spare)  # a script may just let go of its client
        self._is_over = threading.Event()

    def run(self, talk: Talk[T]) -> T:
        """Raises what the talk raises; ClientClosed where it would wait after `end_waits`."""
        waited_s = 0.0
        try:
            wanted = next(talk)
            while True:
                if isinstance(wanted, Remark):
                    wanted = _remarked(self._waits, wanted, talk)
                elif isinstance(wanted, Pause):
                    waited_s += wanted.seconds
                    _tell(self._waits, wanted, waited_s)
                    if self._is_over.wait(wanted.seconds):
                        raise ClientClosed("The client is closed.")
                    wanted = talk.send(None)
                else:
                    wanted = _told(talk, self._ask(wanted))
        except StopIteration as end:
            return end.value

    def _ask(self, ask: Ask) -> Answer | ServerUnreachable:
        method, content, headers = _request(ask)
        http = self._spare.take() or httpx.Client(
            base_url=self._url, headers=self._headers, verify=trusted(), trust_env=False
        )
        try:
            answer = http.request(
                method, ask.path, content=content, headers=headers, timeout=ask.timeout_s
            )
        except httpx.HTTPError as error:
            return _unreachable(self._url, error)
        finally:
            for old in self._spare.put_back(http, time.monotonic()):
                old.close()
        return _answer(answer)

    def end_waits(self) -> None:
        """Requests are still made, pauses are not."""
        self._is_over.set()

    def close(self) -> None:
        self.end_waits()
        _close(self._spare)


class AsyncDriver:
    """For one event loop."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = server_url(url)
        self._headers = _headers(key)
        self._waits = Waits()
        self._spare = Spare[httpx.AsyncClient]()

    async def run(self, talk: Talk[T], is_over: asyncio.Event | None = None) -> T:
        """Raises what the talk raises; ClientClosed where it would wait once `is_over`."""
        waited_s = 0.0
        try:
            wanted = next(talk)
            while True:
                if isinstance(wanted, Remark):
                    wanted = _remarked(self._waits, wanted, talk)
                elif isinstance(wanted, Pause):
                    waited_s += wanted.seconds
                    _tell(self._waits, wanted, waited_s)
                    if await _is_set_within(wanted.seconds, is_over):
                        raise ClientClosed("Nobody waits for it any more.")
                    wanted = talk.send(None)
                else:
                    wanted = _told(talk, await self._ask(wanted))
        except StopIteration as end:
            return end.value

    async def _ask(self, ask: Ask) -> Answer | ServerUnreachable:
        method, content, headers = _request(ask)
        http = self._spare.take() or httpx.AsyncClient(
            base_url=self._url, headers=self._headers, verify=trusted(), trust_env=False
        )
        try:
            answer = await http.request(
                method, ask.path, content=content, headers=headers, timeout=ask.timeout_s
            )
        except httpx.HTTPError as error:
            return _unreachable(self._url, error)
        finally:
            for old in self._spare.put_back(http, time.monotonic()):
                await old.aclose()
        return _answer(answer)

    async def close(self) -> None:
        for http in self._spare.close():
            await http.aclose()


def bare_url(url: str) -> str:
    """A server's URL without the credentials in it: an episode has a key of its own, and messages
    are read by others."""
    return str(httpx.URL(url).copy_with(userinfo=b"")).rstrip("/")


def access_of(url: str, claim: Claim) -> EpisodeAccess:
    """The server as this client knows it: behind a tunnel it does not know its own name."""
    return EpisodeAccess(bare_url(url) + claim.path, claim.api_key, claim.episode_uuid)


async def _is_set_within(seconds: float, event: asyncio.Event | None) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await (event or asyncio.Event()).wait()
    except TimeoutError:
        return False
    return True


def _tell(waits: Waits, pause: Pause, waited_s: float) -> None:
    if waits.is_due(pause.why, waited_s, time.monotonic()):
        log.info("waiting: %s", pause.why)


def _remarked(waits: Waits, remark: Remark, talk: Talk[T]) -> Ask | Pause | Remark:
    """What is wanted after it."""
    if waits.is_due(remark.about, math.inf, time.monotonic()):
        log.warning("%s", remark.text)
    return talk.send(None)


def _close(spare: Spare[httpx.Client]) -> None:
    for http in spare.close():
        http.close()


def _told(talk: Talk[T], came: Answer | ServerUnreachable) -> Ask | Pause | Remark:
    """What is wanted after it."""
    return talk.throw(came) if isinstance(came, ServerUnreachable) else talk.send(came)


def _headers(key: str | None) -> dict[str, str]:
    return bearer_header(key or os.environ.get(KEY_VARIABLE))


def _request(ask: Ask) -> tuple[str, bytes | None, dict[str, str]]:
    if ask.body is None:
        return "GET", None, {}
    return "POST", orjson.dumps(ask.body), {"Content-Type": "application/json"}


def _answer(answer: httpx.Response) -> Answer:
    try:
        return Answer(answer.status_code, orjson.loads(answer.content))
    except orjson.JSONDecodeError:
        return Answer(answer.status_code, answer.text)


def _unreachable(url: str, error: httpx.HTTPError) -> ServerUnreachable:
    cause = str(error) or type(error).__name__
    return ServerUnreachable(f"No swarm server answers at {bare_url(url)} ({cause})")


# How often a client says of its waits, and of what all its episodes are told. Pure.

SHORT_S = 5.0
"""Shorter waits are not worth a line: a step of a small model is over by then, and every episode
that is due waits for it."""
TELL_EVERY_S = 30.0
"""Between lines about the same wait."""
_NUMBER = re.compile(r"\d+")


class Waits:
    """Of all talks of a client, in any thread: hundreds wait for the same thing, and it is told
    once, then now and again."""

    def __init__(self) -> None:
        self._throttle = LogThrottle(TELL_EVERY_S)

    def is_due(self, why: str, waited_s: float, now: float) -> bool:
        """Whether to tell it now, by a talk that has waited so long in all."""
        if waited_s < SHORT_S:
            return False
        words = _NUMBER.sub("N", why)  # which move meanwhile
        return self._throttle.due(words, now) is not None
