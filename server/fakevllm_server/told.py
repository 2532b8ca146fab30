"""A stream of the engine's as the client's format tells it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fakevllm_adapters.formats.base import Exchange
from fakevllm_adapters.formats.chat import end_of
from fakevllm_adapters.formats.sse import DONE, SseDecoder


async def told(chunks: AsyncIterator[bytes], exchange: Exchange) -> AsyncIterator[bytes]:
    """Closed where the engine left it open."""
    decoder = SseDecoder()
    taken: list[bytes] = []
    async for chunk in chunks:
        events = decoder.feed(chunk)
        taken += events
        yield b"".join(map(exchange.event, events))
    if DONE not in taken:
        yield end_of(exchange, taken)
