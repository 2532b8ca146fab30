"""Work ends when the app it is for has left."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from fakevllm.runtime.disconnect import WhileThere
from fakevllm_adapters.http.asgi import ClientLeft


class App:
    """The receiving end of an app that leaves when it is told to."""

    def __init__(self, *, has_left: bool = False) -> None:
        self.left = asyncio.Event()
        if has_left:
            self.left.set()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_what_is_done_before_the_app_leaves_is_kept() -> None:
    app = App()
    async with WhileThere(app.receive):
        await asyncio.sleep(0)
    app.left.set()
    await asyncio.sleep(0.01)  # nothing of the block is left that could be cancelled


async def test_a_block_ends_when_the_app_leaves_and_its_task_goes_on() -> None:
    app = App()
    asyncio.get_running_loop().call_soon(app.left.set)
    with pytest.raises(ClientLeft):
        async with WhileThere(app.receive):
            await for_ever()
    own = asyncio.current_task()
    assert own is not None and own.cancelling() == 0
    await asyncio.sleep(0)


async def test_an_app_that_left_before_is_noticed() -> None:
    with pytest.raises(ClientLeft):
        async with WhileThere(App(has_left=True).receive):
            await for_ever()


async def test_a_block_may_come_to_its_end_after_the_app_has_left() -> None:
    app = App(has_left=True)
    async with WhileThere(app.receive, linger_s=30.0):
        await asyncio.sleep(0.01)


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    app = App()

    async def block() -> None:
        async with WhileThere(app.receive):
            await for_ever()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    app.left.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_is_told_as_it_is() -> None:
    app = App(has_left=True)
    with pytest.raises(KeyError):
        async with WhileThere(app.receive, linger_s=30.0):
            raise KeyError


async def test_a_block_that_ends_in_an_error_of_its_own_as_the_app_leaves_keeps_it() -> None:
    app = App(has_left=True)
    with pytest.raises(KeyError):
        async with WhileThere(app.receive):
            try:
                await for_ever()
            finally:
                raise KeyError
    own = asyncio.current_task()
    assert own is not None and own.cancelling() == 0


@pytest.mark.parametrize("linger_s", [0.0, 0.01])
async def test_an_app_that_leaves_as_its_block_ends_cancels_nothing_behind_it(
    linger_s: float,
) -> None:
    app, work, waiting = App(), asyncio.Event(), asyncio.Event()

    async def block() -> str:
        async with WhileThere(app.receive, linger_s):
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
