"""Tasks that nobody awaits are kept, ended with their owner, and not silent about trouble."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fakevllm.runtime.task_set import Background

log = logging.getLogger("fakevllm.test")


@pytest.fixture
def background() -> Background:
    return Background(log, "it went wrong")


async def test_a_task_is_kept_until_it_is_done(background: Background) -> None:
    may_end = asyncio.Event()

    async def work() -> None:
        await may_end.wait()

    task = background.begin(work())
    assert len(background) == 1
    may_end.set()
    await task
    assert len(background) == 0


async def test_what_a_task_raises_is_logged(
    background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        raise ValueError("odd")

    await asyncio.wait([background.begin(work())])
    assert len(background) == 0
    (record,) = caplog.records
    assert record.getMessage() == "it went wrong" and record.exc_info is not None
    assert str(record.exc_info[1]) == "odd"


async def test_closing_cancels_what_runs(
    background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    tasks = [background.begin(work())]
    await begun.wait()
    tasks.append(background.begin(work()))  # not begun yet
    await background.close()
    assert all(task.cancelled() for task in tasks)
    assert len(background) == 0 and not caplog.records


async def test_a_grace_lets_tasks_come_to_their_end(background: Background) -> None:
    ended: list[str] = []

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        ended.append("well")

    background.begin(work())
    await background.close(10)
    assert ended == ["well"] and len(background) == 0


async def test_a_grace_ends(background: Background) -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    task = background.begin(work())
    await background.close(0.01)
    assert task.cancelled() and len(background) == 0


async def test_what_a_task_does_at_its_end_is_waited_for(background: Background) -> None:
    begun, farewell = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            farewell.set()

    background.begin(work())
    await begun.wait()
    await background.close()
    assert farewell.is_set()
