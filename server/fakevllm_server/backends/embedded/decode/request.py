"""A request, a completion while it is being sampled, and the stream that carries its
tokens out.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import dataclass, field

from fakevllm_server.backends.embedded.decode.logits_processors import LogitsProcessor
from fakevllm_server.types.sampling import Sampling, Token


class TokenStream:
    """Tokens on their way from the engine thread to one asyncio task.

    Holds at most the request's own tokens, so it needs no other bound.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[list[Token], bool] | Exception] = asyncio.Queue()

    def put(self, tokens: list[Token], is_last: bool) -> None:
        """Only on `loop`."""
        self._queue.put_nowait((tokens, is_last))

    def fail(self, error: Exception) -> None:
        """Only on `loop`."""
        self._queue.put_nowait(error)

    async def get(self) -> tuple[list[Token], bool]:
        """The next tokens, and whether they are the last."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """`ids` is the truth: prompt, then what was sampled. A row of the cache holds all of them but
    the last.
    """

    ids: list[int]
    limit: int
    """Most new tokens."""
    sampling: Sampling
    rng: random.Random
    """Its own when seeded, else the engine's."""
    stream: TokenStream | None
    bend: LogitsProcessor | None = None
    """None: sampled from the model's own distribution, but for temperature and cuts."""
    num_sampled: int = 0
    undelivered: list[Token] = field(default_factory=list[Token])
    finished: bool = False
    cancelled: bool = False
    """Set by the asyncio side; the engine thread reads it before each iteration."""

    @property
    def prefix_key(self) -> bytes:
        """Names the tokens whose keys and values it needs before it can be decoded."""
        return array("i", self.ids[:-1]).tobytes()

    def take(self, token: Token, eos_ids: frozenset[int]) -> None:
        self.ids.append(token.id)
        self.num_sampled += 1
        self.undelivered.append(token)
        if self.bend is not None:
            self.bend.take(token.id)
        ended = token.id in eos_ids and not self.sampling.ignore_eos
        stopped = token.id in self.sampling.stop_ids
        self.finished = ended or stopped or self.num_sampled >= self.limit
