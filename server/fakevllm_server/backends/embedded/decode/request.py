"""A request that is being decoded, and its token stream. The stream passes the tokens to an asyncio
task."""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import dataclass, field

from fakevllm_server.backends.embedded.decode.logits_processors import LogitsProcessor
from fakevllm_server.types.sampling import Sampling, Token


class TokenStream:
    """A queue of tokens from the engine thread to one asyncio task.

    The queue has no size limit, because it holds at most the tokens of one request.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[list[Token], bool] | Exception] = asyncio.Queue()

    def put(self, tokens: list[Token], is_last: bool) -> None:
        """Pass sampled tokens to the asyncio task that reads the stream. Call this method only on
        the stream's event loop `loop`."""
        self._queue.put_nowait((tokens, is_last))

    def fail(self, error: Exception) -> None:
        """Make `get` raise `error` in the waiting task. Call this method only on the stream's event
        loop `loop`."""
        self._queue.put_nowait(error)

    async def get(self) -> tuple[list[Token], bool]:
        """Wait for the next tokens of the request. Return the pair (tokens, is_last). `is_last` is
        True if no further tokens follow."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request that is being decoded. While the request is a row of the batch, the KV cache
    holds keys and values for all of its ids (prompt and sampled tokens) except the last id."""

    ids: list[int]
    """The prompt, then the sampled tokens."""
    limit: int
    """Maximum number of new tokens."""
    sampling: Sampling
    rng: random.Random
    """Random number generator. A request with a seed has its own generator. All other requests
    share the engine's generator."""
    stream: TokenStream | None
    logits_processor: LogitsProcessor | None = None
    """None if only temperature, top-k, top-p and min-p change the model's distribution."""
    num_sampled: int = 0
    undelivered: list[Token] = field(default_factory=list[Token])
    finished: bool = False
    cancelled: bool = False
    """Set by the asyncio side; the engine thread reads it before each iteration."""

    @property
    def prefix(self) -> list[int]:
        """All ids of the request except the last id. The keys and values of these ids must be
        computed before the request can be decoded."""
        return self.ids[:-1]

    @property
    def prefix_key(self) -> bytes:
        """The token ids of `prefix` (all ids of the request except the last id) as bytes. Requests
        with equal keys share a prefill."""
        return array("i", self.prefix).tobytes()

    def take(self, token: Token, eos_ids: frozenset[int]) -> None:
        """Append a sampled token to the request. Set `finished` if it is the request's last
        token."""
        self.ids.append(token.id)
        self.num_sampled += 1
        self.undelivered.append(token)
        if self.logits_processor is not None:
            self.logits_processor.take(token.id)
        ended = token.id in eos_ids and not self.sampling.ignore_eos
        stopped = token.id in self.sampling.stop_ids
        self.finished = ended or stopped or self.num_sampled >= self.limit
