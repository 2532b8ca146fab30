"""Run coroutines as tasks, with a limit on the number of tasks that run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_bounded(
    coroutines: Iterable[Coroutine[Any, Any, T]], concurrency: int
) -> AsyncGenerator[T]:
    """Run the coroutines, at most `concurrency` at a time, and yield their results in the order in
    which they end.

    `coroutines` may be endless. The next coroutine is taken only when fewer than `concurrency`
    coroutines run. When the generator is closed, or when a coroutine raises an error, all other
    coroutines are cancelled.
    """
    source = iter(coroutines)
    running: set[asyncio.Task[T]] = set()
    try:
        while True:
            while len(running) < concurrency and (one := next(source, None)) is not None:
                running.add(asyncio.create_task(one))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
