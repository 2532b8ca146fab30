"""Requests of an app: prompts of a given size, and a client that sends them."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import orjson

ANSWER = "The quick brown fox jumps over."
"""Text of each answer. One byte is one token of the fake engine, and one chunk of a stream."""
FINISHED = re.compile(rb'"finish_reason":\s?"stop"')
_WORDS = ("river", "stone", "paper", "cloud", "seven", "lantern", "quiet", "orchard", "metal")


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of one request, in seconds of time.perf_counter(), which all processes share."""

    started: float
    first_byte: float
    """Time at which the first byte of the answer's body arrived."""
    ended: float

    @property
    def latency_s(self) -> float:
        return self.ended - self.started


class Prompts:
    """Bodies of chat requests. All prompts differ in their first words, so that no program can save
    work by storing or computing equal prompts only once."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._text = ""

    def bodies(self, num: int, num_bytes: int, *, streamed: bool) -> list[bytes]:
        """Return `num` bodies of `num_bytes` bytes."""
        return [self._body(num_bytes, streamed) for _ in range(num)]

    def _body(self, num_bytes: int, streamed: bool) -> bytes:
        message = {"role": "user", "content": f"[[say {ANSWER}]] {next(self._numbers)} "}
        body = {"model": "fake", "messages": [message], "stream": streamed}
        message["content"] += self._words(num_bytes - len(orjson.dumps(body)))
        return orjson.dumps(body)

    def _words(self, num_bytes: int) -> str:
        """Return words that are `num_bytes` long in total."""
        if len(self._text) < num_bytes:
            words = random.Random(0).choices(_WORDS, k=num_bytes // 4)
            self._text = " ".join(words)
        return self._text[:num_bytes]


async def send(
    http: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], concurrency: int
) -> list[Timing]:
    """Send the bodies as chat requests to `url`, at most `concurrency` at a time, and return the
    moments of each request. Raises AssertionError for an answer that is not whole."""
    timings: list[Timing] = []
    waiting: Iterator[bytes] = iter(bodies)

    async def work() -> None:
        for body in waiting:
            timings.append(await send_one(http, url, body))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return timings


async def send_one(http: aiohttp.ClientSession, url: str, body: bytes) -> Timing:
    """Send one chat request and read its answer."""
    headers = {"Content-Type": "application/json"}
    started = time.perf_counter()
    async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
        raw = await answer.content.readany()
        first_byte = time.perf_counter()
        raw += await answer.content.read()
    ended = time.perf_counter()
    assert answer.status == 200 and FINISHED.search(raw), raw[:1000]
    return Timing(started, first_byte, ended)
