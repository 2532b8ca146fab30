"""The full-screen terminal application of `fakevllm overwatch`. It polls the server's state once a
second, draws the state, and handles the keyboard.

This is the only module that imports textual.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from fakevllm.overwatch.poller import WatchedServer
from fakevllm.overwatch.render import render_snapshot
from fakevllm.overwatch.server_actions import SERVER_ACTIONS, ServerAction
from fakevllm.overwatch.snapshot import Snapshot
from fakevllm.sdk.types import SwarmError

POLL_INTERVAL_S = 1.0
NOTIFICATION_S = 10.0
"""Seconds for which the result of an action is shown."""
SCROLL_BAR_COLUMNS = 2
QUIT_DURING_DRAIN = (
    "Quit? This ends the drain: episode claims stay paused, and the engine keeps running."
)


class Confirm(ModalScreen[bool]):
    """A dialog with a question that the user answers with y or n."""

    CSS = """
    Confirm { align: center middle; }
    #question { width: 70%; max-width: 72; height: auto; padding: 1 2; border: round yellow; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
        Binding("ctrl+c", "app.leave", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(f"{self.question}\n\ny yes    n no", markup=False)
        yield Footer()

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)


class OverwatchApp(App[None]):
    CSS = "#picture { height: auto; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(action.key, f"confirm('{action.name}')", action.name)
            for action in SERVER_ACTIONS
        ),
        Binding("q,ctrl+c", "leave", "quit"),
    ]

    def __init__(self, server: WatchedServer, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        super().__init__()
        self._server = server
        self._poll_interval_s = poll_interval_s
        self._picture = Static("polling the server …", id="picture", markup=False)
        self._snapshot: Snapshot | None = None
        self._running_actions: list[ServerAction] = []

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._picture
        yield Footer()

    def on_mount(self) -> None:
        self._start_poll()
        self.set_interval(self._poll_interval_s, self._start_poll)

    def on_resize(self) -> None:
        self._draw()

    def _start_poll(self) -> None:
        """Start a poll of the server, unless the previous poll is still running. Without this
        check, polls of a slow server would pile up."""
        if not any(worker.group == "poll" and worker.is_running for worker in self.workers):
            self.run_worker(self._poll, group="poll")

    async def _poll(self) -> None:
        self._snapshot = await self._server.poll()
        self._draw()

    def _draw(self) -> None:
        """Draw the latest snapshot of the server's state. While the screen is being closed, draw
        nothing. (A poll that ends during this time still calls this method.)
        """
        if self._snapshot is not None and self._picture.is_attached and self.is_running:
            width = max(1, self.size.width - SCROLL_BAR_COLUMNS)
            self._picture.update(render_snapshot(self._snapshot, width))

    def action_confirm(self, name: str) -> None:
        """Ask the user to confirm the server action `name`, such as `stop` or `drain`. If this
        action is running already, only show a message that says so, because an action must not run
        twice at the same time.

        For example, a drain pauses episode claims, so that clients get no new episodes. After the
        last episode, the drain stops the engine. Another user can cancel the drain by resuming
        claims. A second drain would pause the claims once more, against that user's wish.
        """
        action = next(action for action in SERVER_ACTIONS if action.name == name)
        if action in self._running_actions:
            return self.notify(
                "This action is still running.", title=action.name, timeout=NOTIFICATION_S
            )
        self.push_screen(Confirm(action.question), partial(self._start_action, action))

    def _start_action(self, action: ServerAction, is_yes: bool | None) -> None:
        if is_yes:
            self._running_actions.append(action)
            self.run_worker(partial(self._perform, action), group="actions")

    async def _perform(self, action: ServerAction) -> None:
        try:
            message = await self._server.perform(action)
        except SwarmError as error:
            self.notify(
                error.detail,
                title=action.name,
                severity="error",
                timeout=NOTIFICATION_S,
                markup=False,
            )
        else:
            self.notify(message, title=action.name, timeout=NOTIFICATION_S, markup=False)
        finally:
            self._running_actions.remove(action)

    def action_leave(self) -> None:
        """Quit the application. If a drain is running, first ask the user to confirm, because
        quitting ends the drain. (A drain stops the engine after the last running episode.) If the
        user quits a second time while this question is open, quit at once."""
        is_asked = isinstance(self.screen, Confirm) and self.screen.question == QUIT_DURING_DRAIN
        if is_asked or not any(action.name == "drain" for action in self._running_actions):
            return self.exit()
        self.push_screen(Confirm(QUIT_DURING_DRAIN), lambda is_yes: self.exit() if is_yes else None)
