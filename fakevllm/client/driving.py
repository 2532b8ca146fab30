"""Carries talks out: requests over httpx, pauses by the clock. One driver for threads, one for an
event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TypeVar

import httpx
import orjson

from fakevllm.client.access import EpisodeAccess
from fakevllm.client.episodes import Claim
from fakevllm.client.errors import ServerUnreachable
from fakevllm.client.talk import Answer, Ask, Pause, Talk
from fakevllm_adapters.keys import bearer_header

log = logging.getLogger("fakevllm.client")
T = TypeVar("T")

KEY_VARIABLE = "FAKEVLLM_SWARM_KEY"
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)
"""Hundreds of threads may share a client."""
TELL_EVERY_S = 30.0
"""Between lines about the same wait."""


class Driver:
    """For threads: any number of them may drive talks at once."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self._url, headers=_headers(key), limits=LIMITS, trust_env=False
        )

    def run(self, talk: Talk[T]) -> T:
        """Raises what the talk raises."""
        waiting = _Waiting()
        try:
            wanted = next(talk)
            while True:
                if isinstance(wanted, Pause):
                    waiting.tell(wanted, time.monotonic())
                    time.sleep(wanted.seconds)
                    wanted = talk.send(None)
                    continue
                try:
                    answer = self._ask(wanted)
                except httpx.HTTPError as error:
                    wanted = talk.throw(_unreachable(self._url, error))
                else:
                    wanted = talk.send(answer)
        except StopIteration as end:
            return end.value

    def _ask(self, ask: Ask) -> Answer:
        method, content, headers = _request(ask)
        answer = self._http.request(
            method, ask.path, content=content, headers=headers, timeout=ask.timeout_s
        )
        return _answer(answer)

    def close(self) -> None:
        self._http.close()


class AsyncDriver:
    """For one event loop."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self._url, headers=_headers(key), limits=LIMITS, trust_env=False
        )

    async def run(self, talk: Talk[T]) -> T:
        """Raises what the talk raises."""
        waiting = _Waiting()
        try:
            wanted = next(talk)
            while True:
                if isinstance(wanted, Pause):
                    waiting.tell(wanted, time.monotonic())
                    await asyncio.sleep(wanted.seconds)
                    wanted = talk.send(None)
                    continue
                try:
                    answer = await self._ask(wanted)
                except httpx.HTTPError as error:
                    wanted = talk.throw(_unreachable(self._url, error))
                else:
                    wanted = talk.send(answer)
        except StopIteration as end:
            return end.value

    async def _ask(self, ask: Ask) -> Answer:
        method, content, headers = _request(ask)
        answer = await self._http.request(
            method, ask.path, content=content, headers=headers, timeout=ask.timeout_s
        )
        return _answer(answer)

    async def close(self) -> None:
        await self._http.aclose()


class _Waiting:
    """Says what is waited for, once and then now and again. Waits of a second are not worth it."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._told_at: float | None = None

    def tell(self, pause: Pause, now: float) -> None:
        self._waited_s += pause.seconds
        is_due = self._told_at is None or now - self._told_at >= TELL_EVERY_S
        if self._waited_s >= 1.0 and is_due:
            self._told_at = now
            log.info("waiting: %s", pause.why)


def bare_url(url: str) -> str:
    """A server's URL without the credentials in it: an episode has a key of its own, and messages
    are read by others."""
    return str(httpx.URL(url).copy_with(userinfo=b"")).rstrip("/")


def access_of(url: str, claim: Claim) -> EpisodeAccess:
    """The server as this client knows it: behind a tunnel it does not know its own name."""
    return EpisodeAccess(bare_url(url) + claim.path, claim.api_key, claim.episode_uuid)


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
