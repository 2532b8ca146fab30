"""A task set keeps its tasks alive, cancels them when it is closed, and logs their errors."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fakevllm.runtime.task_set import TaskSet

log = logging.getLogger("fakevllm.test")


@pytest.fixture
def task_set() -> TaskSet:
    return TaskSet(log, "it went wrong")


async def test_a_task_is_kept_until_it_is_done(task_set: TaskSet) -> None:
    may_end = asyncio.Event()

    async def work() -> None:
        await may_end.wait()

    task = task_set.start(work())
    assert len(task_set) == 1
    may_end.set()
    await task
    assert len(task_set) == 0


async def test_an_error_of_a_task_is_logged(
    task_set: TaskSet, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        raise ValueError("odd")

    await asyncio.wait([task_set.start(work())])
    assert len(task_set) == 0
    (record,) = caplog.records
    assert record.getMessage() == "it went wrong" and record.exc_info is not None
    assert str(record.exc_info[1]) == "odd"


async def test_closing_cancels_running_tasks(
    task_set: TaskSet, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    tasks = [task_set.start(work())]
    await begun.wait()
    tasks.append(task_set.start(work()))  # not begun yet
    await task_set.close()
    assert all(task.cancelled() for task in tasks)
    assert len(task_set) == 0 and not caplog.records


async def test_closing_with_a_grace_period_lets_tasks_finish(task_set: TaskSet) -> None:
    ended: list[str] = []

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        ended.append("well")

    task_set.start(work())
    await task_set.close(10)
    assert ended == ["well"] and len(task_set) == 0


async def test_a_task_is_cancelled_when_the_grace_period_ends(task_set: TaskSet) -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    task = task_set.start(work())
    await task_set.close(0.01)
    assert task.cancelled() and len(task_set) == 0


async def test_closing_waits_for_the_cleanup_of_cancelled_tasks(task_set: TaskSet) -> None:
    begun, cleaned_up = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.set()

    task_set.start(work())
    await begun.wait()
    await task_set.close()
    assert cleaned_up.is_set()
