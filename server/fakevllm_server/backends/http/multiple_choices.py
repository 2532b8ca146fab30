"""Sample several choices of one request at the same time. There are three ways: run all choices to
their end, merge their streams, or yield each choice when it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fakevllm_adapters.http.complete_choices import SentChoice

Json = dict[str, Any]
T = TypeVar("T")


async def run_all(choices: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all `choices` at the same time, and wait until they have ended. If one choice fails,
    cancel the other choices and raise the error of the failed choice."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for choice in choices:
                tasks.create_task(choice)
    # Translated: callers handle an engine's own errors, not exception groups.
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def drain(stream: AsyncGenerator[object]) -> None:
    """Read `stream` to its end and discard its items. Then close `stream`."""
    async with aclosing(stream):
        async for _ in stream:
            pass


async def stream_all(
    choices: Sequence[AsyncGenerator[Json]], usage_chunk: Callable[[], Json] | None
) -> AsyncGenerator[Json]:
    """Yield the chunks of all choices in order of arrival. Then yield `usage_chunk()`, unless
    `usage_chunk` is None."""
    async with aclosing(_merge(choices)) as chunks:
        async for chunk in chunks:
            yield chunk
    if usage_chunk is not None:
        yield usage_chunk()


def complete_all(
    choices: Sequence[Coroutine[Any, Any, SentChoice]],
) -> AsyncGenerator[SentChoice]:
    """Run all `choices` at the same time. Yield each choice's result as soon as this choice is
    complete."""
    return _merge([_only(choice) for choice in choices])


async def _only(choice: Coroutine[Any, Any, T]) -> AsyncGenerator[T]:
    yield await choice


async def _merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of all streams in order of arrival.

    Closing the merged stream closes all streams. If one stream fails, read the other streams to
    their end, and then raise the error of the failed stream.
    """
    queue: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            else:
                yield item[0]
        for pump in pumps:
            pump.result()
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T], queue: asyncio.Queue[tuple[T] | None]) -> None:
    """Put each item of `stream` into `queue`, wrapped in a tuple. At the end of the stream, put
    None."""
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((item,))
    finally:
        queue.put_nowait(None)
