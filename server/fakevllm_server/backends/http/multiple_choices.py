"""Sample several choices of one request at the same time. Either run all choices to their end, or
merge the streams of the choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

Json = dict[str, Any]
T = TypeVar("T")


async def run_all(choices: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all `choices` at the same time until all have ended. If one choice fails, cancel all
    other choices and raise the error of the failed choice."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for choice in choices:
                tasks.create_task(choice)
    # Translated: callers handle an engine's own errors, not exception groups.
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def drain(stream: AsyncGenerator[object]) -> None:
    """Read `stream` to its end without using the items, and close the stream."""
    async with aclosing(stream):
        async for _ in stream:
            pass


async def stream_all(
    choices: Sequence[AsyncGenerator[Json]], usage_chunk: Callable[[], Json] | None
) -> AsyncGenerator[Json]:
    """Yield the chunks of all choices in order of arrival. Afterwards yield the usage chunk, if the
    request has one."""
    async with aclosing(_merge(choices)) as chunks:
        async for chunk in chunks:
            yield chunk
    if usage_chunk is not None:
        yield usage_chunk()


async def _merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of all streams in order of arrival.

    Closing the merged stream closes all streams. The error of one stream is raised after the other
    streams have ended.
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
    """Put each item of `stream` into `queue`, as a tuple of one item. After the last item, put
    None."""
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((item,))
    finally:
        queue.put_nowait(None)
