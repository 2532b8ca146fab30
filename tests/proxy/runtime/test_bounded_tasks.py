"""Coroutines of which only so many run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from fakevllm.runtime.bounded_tasks import run_bounded


class Jobs:
    """Coroutines that wait until they are released, and record how they ended."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun: list[int] = []
        self.cancelled: list[int] = []

    async def run(self, number: int) -> int:
        self.begun.append(number)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return number

    async def fail(self) -> int:
        raise ValueError("broken")


async def test_the_next_coroutine_is_taken_only_when_another_has_ended() -> None:
    jobs = Jobs()
    taken: list[int] = []

    def endless() -> Iterator[Coroutine[Any, Any, int]]:
        number = 0
        while True:
            taken.append(number)
            yield jobs.run(number)
            number += 1

    async with aclosing(run_bounded(endless(), 2)) as results:
        first = asyncio.ensure_future(anext(results))
        while len(jobs.begun) < 2:
            await asyncio.sleep(0)
        assert taken == [0, 1]
        jobs.gate.set()
        assert await first in (0, 1)


async def test_closing_the_results_cancels_what_runs() -> None:
    jobs = Jobs()
    results = run_bounded((jobs.run(number) for number in range(3)), 3)
    first = asyncio.ensure_future(anext(results))
    while len(jobs.begun) < 3:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await results.aclose()
    assert sorted(jobs.cancelled) == [0, 1, 2]


async def test_an_error_is_raised_and_cancels_the_others() -> None:
    jobs = Jobs()
    with pytest.raises(ValueError, match="broken"):
        await anext(run_bounded([jobs.run(0), jobs.fail()], 2))
    assert jobs.cancelled == [0]
