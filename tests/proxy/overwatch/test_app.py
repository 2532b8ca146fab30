"""The full-screen application with a server that records the actions, driven by key presses."""

from __future__ import annotations

import asyncio

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from fakevllm.overwatch.app import QUIT_DURING_DRAIN, Confirm, OverwatchApp
from fakevllm.overwatch.server_actions import SERVER_ACTIONS, ServerAction
from fakevllm.overwatch.snapshot import Snapshot
from fakevllm.sdk.types import SwarmError
from tests.proxy.overwatch.cases import CASES, snapshot_at_work

NEVER_S = 3600.0


class RecordingServer:
    """A server that records the actions, and fails each action if it has a refusal."""

    def __init__(self, refusal: str | None = None) -> None:
        self.num_polls = 0
        self.performed: list[str] = []
        self.refusal = refusal
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    async def poll(self) -> Snapshot:
        self.num_polls += 1
        return snapshot_at_work()

    async def perform(self, action: ServerAction) -> str:
        self.performed.append(action.name)
        await self.may_finish.wait()
        if self.refusal is not None:
            raise SwarmError(self.refusal, 403)
        return f"{action.name}: done"


def picture_text(app: OverwatchApp) -> str:
    static = app.screen_stack[0].query_one("#picture", Static)
    strips = static.render_lines(static.size.region)
    return "\n".join(strip.text for strip in strips)


def notifications(app: OverwatchApp) -> list[str]:
    return [note.message for note in app._notifications]  # pyright: ignore[reportPrivateUsage]


async def wait_until_idle(pilot: Pilot[None]) -> None:
    await pilot.app.workers.wait_for_complete()  # pyright: ignore[reportUnknownMemberType]
    await pilot.pause()


async def test_the_screen_shows_the_server_and_follows_the_terminals_size() -> None:
    app = OverwatchApp(RecordingServer(), NEVER_S)
    async with app.run_test(size=(110, 40)) as pilot:
        await wait_until_idle(pilot)
        text = picture_text(app)
        assert "ROLLING" in text and "sum-3" in text and "mean reward, steps 1 to 12" in text
        await pilot.resize_terminal(50, 40)
        await pilot.pause()
        assert max(map(len, picture_text(app).splitlines())) <= 50


@pytest.mark.parametrize("action", SERVER_ACTIONS, ids=lambda action: action.name)
async def test_an_action_needs_the_answer_yes(action: ServerAction) -> None:
    server = RecordingServer()
    app = OverwatchApp(server, NEVER_S)
    async with app.run_test() as pilot:
        for no in ("n", "escape"):
            await pilot.press(action.key)
            assert isinstance(app.screen, Confirm)
            await pilot.press(no)
            await wait_until_idle(pilot)
        assert server.performed == []
        await pilot.press(action.key, "y")
        await wait_until_idle(pilot)
        assert server.performed == [action.name] and notifications(app) == [f"{action.name}: done"]


async def test_a_refusal_is_shown_in_the_servers_words() -> None:
    app = OverwatchApp(RecordingServer("/stop_engine is for admins [alice]"), NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("x", "y")
        await wait_until_idle(pilot)
        assert notifications(app) == ["/stop_engine is for admins [alice]"]


async def test_q_quits_at_once_and_asks_only_during_a_drain() -> None:
    server = RecordingServer()
    app = OverwatchApp(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("q")
    assert app.return_code == 0
    server.may_finish.clear()
    app = OverwatchApp(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "y")
        await pilot.press("q")
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        assert app.is_running
        server.may_finish.set()
        await wait_until_idle(pilot)
        await pilot.press("q")
    assert app.return_code == 0


async def test_ctrl_c_quits_from_a_question_and_needs_a_second_press_during_a_drain() -> None:
    server = RecordingServer()
    app = OverwatchApp(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "ctrl+c")
        assert app.return_code == 0 and server.performed == []
    server.may_finish.clear()
    app = OverwatchApp(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "y", "x", "ctrl+c")
        assert isinstance(app.screen, Confirm) and app.screen.question == QUIT_DURING_DRAIN
        assert app.return_code is None
        await pilot.press("ctrl+c")
        assert app.return_code == 0 and server.performed == ["drain"]


async def test_a_running_action_is_not_started_again() -> None:
    server = RecordingServer()
    server.may_finish.clear()
    app = OverwatchApp(server, NEVER_S)
    async with app.run_test() as pilot:
        await pilot.press("d", "y", "d", "y")
        await pilot.press("x", "y")
        assert server.performed == ["drain", "stop"] and notifications(app) == [
            "This action is still running."
        ]
        server.may_finish.set()
        await wait_until_idle(pilot)
        await pilot.press("d", "y")
        await wait_until_idle(pilot)
        assert server.performed == ["drain", "stop", "drain"]


async def test_a_poll_that_ends_after_the_screen_was_closed_raises_nothing() -> None:
    app = OverwatchApp(RecordingServer(), NEVER_S)
    async with app.run_test() as pilot:
        await wait_until_idle(pilot)
    await app._poll()  # pyright: ignore[reportPrivateUsage]


async def test_a_server_that_does_not_answer_is_shown_as_away() -> None:
    class AwayServer(RecordingServer):
        async def poll(self) -> Snapshot:
            return CASES["never_seen"]

    app = OverwatchApp(AwayServer(), NEVER_S)
    async with app.run_test() as pilot:
        await wait_until_idle(pilot)
        assert "AWAY" in picture_text(app)


async def test_the_server_is_polled_repeatedly_and_never_twice_at_once() -> None:
    polled_three_times = asyncio.Event()

    class CountingServer(RecordingServer):
        num_running = 0

        async def poll(self) -> Snapshot:
            self.num_running += 1
            assert self.num_running == 1
            await asyncio.sleep(0)
            self.num_running -= 1
            self.num_polls += 1
            if self.num_polls >= 3:
                polled_three_times.set()
            return snapshot_at_work()

    server = CountingServer()
    async with OverwatchApp(server, 0.01).run_test():
        async with asyncio.timeout(20):
            await polled_three_times.wait()
