"""A block of work is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from fakevllm.runtime.disconnect import CancelOnDisconnect
from fakevllm_adapters.http.asgi import ClientDisconnected


class App:
    """The ASGI channel of a client that disconnects when `left` is set."""

    def __init__(self, *, has_left: bool = False) -> None:
        self.left = asyncio.Event()
        if has_left:
            self.left.set()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_block_that_ends_before_the_disconnect_is_not_cancelled() -> None:
    app = App()
    async with CancelOnDisconnect(app.receive):
        await asyncio.sleep(0)
    app.left.set()
    await asyncio.sleep(0.01)  # a late cancellation of this task would raise here


async def test_a_disconnect_cancels_the_block_and_not_the_task_around_it() -> None:
    app = App()
    asyncio.get_running_loop().call_soon(app.left.set)
    with pytest.raises(ClientDisconnected):
        async with CancelOnDisconnect(app.receive):
            await for_ever()
    own = asyncio.current_task()
    assert own is not None and own.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_disconnect_before_the_block_cancels_the_block() -> None:
    with pytest.raises(ClientDisconnected):
        async with CancelOnDisconnect(App(has_left=True).receive):
            await for_ever()


async def test_a_block_may_finish_within_the_linger_time_after_a_disconnect() -> None:
    app = App(has_left=True)
    async with CancelOnDisconnect(app.receive, linger_s=30.0):
        await asyncio.sleep(0.01)


async def test_a_cancellation_from_elsewhere_stays_a_cancelled_error() -> None:
    app = App()

    async def block() -> None:
        async with CancelOnDisconnect(app.receive):
            await for_ever()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    app.left.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_raised_by_the_block_is_passed_on_unchanged() -> None:
    app = App(has_left=True)
    with pytest.raises(KeyError):
        async with CancelOnDisconnect(app.receive, linger_s=30.0):
            raise KeyError


async def test_an_error_raised_during_the_cancellation_is_passed_on_unchanged() -> None:
    app = App(has_left=True)
    with pytest.raises(KeyError):
        async with CancelOnDisconnect(app.receive):
            try:
                await for_ever()
            finally:
                raise KeyError
    own = asyncio.current_task()
    assert own is not None and own.cancelling() == 0


@pytest.mark.parametrize("linger_s", [0.0, 0.01])
async def test_a_disconnect_at_the_moment_the_block_ends_cancels_nothing_after_it(
    linger_s: float,
) -> None:
    app, work, waiting = App(), asyncio.Event(), asyncio.Event()

    async def block() -> str:
        async with CancelOnDisconnect(app.receive, linger_s):
            waiting.set()
            await work.wait()
        await asyncio.sleep(0.05)
        return "went on"

    task = asyncio.create_task(block())
    await waiting.wait()
    await asyncio.sleep(0)
    app.left.set()
    work.set()
    assert await task == "went on"
