"""The screen and its keys, driven as a user would, before a server that notes what it is told."""

from __future__ import annotations

import asyncio

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from fakevllm.overwatch.acts import ACTS, Act
from fakevllm.overwatch.app import LEAVE, Confirm, Overwatch
from fakevllm.overwatch.snapshot import Snapshot
from fakevllm.sdk.types import SwarmError
from tests.proxy.overwatch.cases import CASES, at_work

NEVER_S = 3600.0


class Noting:
    def __init__(self, refusal: str | None = None) -> None:
        self.looks = 0
        self.done: list[str] = []
        self.refusal = refusal
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def look(self) -> Snapshot:
        self.looks += 1
        return at_work()

    async def do(self, act: Act) -> str:
        self.done.append(act.name)
        await self.goes_on.wait()
        if self.refusal is not None:
            raise SwarmError(self.refusal, 403)
        return f"{act.name}: done"


def picture(app: Overwatch) -> str:
    static = app.screen_stack[0].query_one("#picture", Static)
    strips = static.render_lines(static.size.region)
    return "\n".join(strip.text for strip in strips)


def told(app: Overwatch) -> list[str]:
    return [note.message for note in app._notifications]  # pyright: ignore[reportPrivateUsage]


async def settled(pilot: Pilot[None]) -> None:
    await pilot.app.workers.wait_for_complete()  # pyright: ignore[reportUnknownMemberType]
    await pilot.pause()


async def test_what_the_server_does_is_on_the_screen() -> None:
    app = Overwatch(Noting(), NEVER_S)
    async with app.run_test(size=(110, 40)) as pilot:
        await settled(pilot)
        text = picture(app)
        assert "ROLLING" in text and "sum-3" in text and "mean reward, steps 1 to 12" in text
        await pilot.resize_terminal(50, 40)
        await pilot.pause()
        assert max(map(len, picture(app).splitlines())) <= 50


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
async def test_nothing_is_done_before_a_yes(act: Act) -> None:
    server = Noting()
    app = Overwatch(server, NEVER_S)
    async with app.run_test() as pilot:
        for no in ("n", "escape"):
            await pilot.press(act.key)
            assert isinstance(app.screen, Confirm)
            await pilot.press(no)
            await settled(pilot)
        assert server.done == []
        await pilot.press(act.key, "y")
        await settled(pilot)
        assert server.done == [act.name] and told(app) == [f"{act.name}: done"]


async def test_a_refusal_is_told_in_the_servers_words() -> None:
    app = Overwatch(Noting("/stop_engine is for admins [alice]"), NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("x", "y")
        await settled(pilot)
        assert told(app) == ["/stop_engine is for admins [alice]"]


async def test_q_leaves_at_once_and_asks_only_while_a_drain_is_at_work() -> None:
    server = Noting()
    app = Overwatch(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("q")
    assert app.return_code == 0
    server.goes_on.clear()
    app = Overwatch(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "y")
        await pilot.press("q")
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        assert app.is_running
        server.goes_on.set()
        await settled(pilot)
        await pilot.press("q")
    assert app.return_code == 0


async def test_ctrl_c_leaves_from_a_question_too_and_said_twice_from_a_drain() -> None:
    server = Noting()
    app = Overwatch(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "ctrl+c")
        assert app.return_code == 0 and server.done == []
    server.goes_on.clear()
    app = Overwatch(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "y", "x", "ctrl+c")
        assert isinstance(app.screen, Confirm) and app.screen.question == LEAVE
        assert app.return_code is None
        await pilot.press("ctrl+c")
        assert app.return_code == 0 and server.done == ["drain"]


async def test_an_act_that_is_at_work_is_not_begun_again() -> None:
    server = Noting()
    server.goes_on.clear()
    app = Overwatch(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "y", "d", "y")
        await pilot.press("x", "y")
        assert server.done == ["drain", "stop"] and told(app) == ["It is still at work."]
        server.goes_on.set()
        await settled(pilot)
        await pilot.press("d", "y")
        await settled(pilot)
        assert server.done == ["drain", "stop", "drain"]


async def test_an_answer_that_comes_while_the_screen_is_left_is_not_stumbled_over() -> None:
    app = Overwatch(Noting(), NEVER_S)
    async with app.run_test() as pilot:
        await settled(pilot)
    await app._look()  # pyright: ignore[reportPrivateUsage]


async def test_a_server_that_is_away_is_shown_as_such() -> None:
    class Away(Noting):
        async def look(self) -> Snapshot:
            return CASES["never_seen"]

    app = Overwatch(Away(), NEVER_S)
    async with app.run_test() as pilot:
        await settled(pilot)
        assert "AWAY" in picture(app)


async def test_the_server_is_asked_again_and_again_but_never_twice_at_once() -> None:
    server = Noting()
    asked_thrice = asyncio.Event()

    class Counted(Noting):
        at_once = 0

        async def look(self) -> Snapshot:
            self.at_once += 1
            assert self.at_once == 1
            await asyncio.sleep(0)
            self.at_once -= 1
            self.looks += 1
            if self.looks >= 3:
                asked_thrice.set()
            return at_work()

    server = Counted()
    async with Overwatch(server, 0.01).run_test():
        async with asyncio.timeout(20):
            await asked_thrice.wait()
