"""The picture on a whole terminal, drawn each second, with keys. The only place for textual."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from fakevllm.overwatch.acts import ACTS, Act
from fakevllm.overwatch.poll import Watched
from fakevllm.overwatch.render import drawn
from fakevllm.overwatch.snapshot import Snapshot
from fakevllm.sdk.types import SwarmError

LOOK_EVERY_S = 1.0
TELL_S = 10.0
"""How long an act's outcome is on the screen."""
MARGIN = 2
"""Columns that the scroll bar takes."""
LEAVE = "Quit? The drain ends here: episodes stay paused, and the engine runs on."


class Confirm(ModalScreen[bool]):
    """One question, y or n."""

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


class Overwatch(App[None]):
    CSS = "#picture { height: auto; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(act.key, f"ask('{act.name}')", act.name) for act in ACTS),
        Binding("q,ctrl+c", "leave", "quit"),
    ]

    def __init__(self, server: Watched, every_s: float = LOOK_EVERY_S) -> None:
        super().__init__()
        self._server = server
        self._every_s = every_s
        self._picture = Static("asking the server …", id="picture", markup=False)
        self._shot: Snapshot | None = None
        self._at_work: list[Act] = []

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._picture
        yield Footer()

    def on_mount(self) -> None:
        self._begin_look()
        self.set_interval(self._every_s, self._begin_look)

    def on_resize(self) -> None:
        self._draw()

    def _begin_look(self) -> None:
        """One at a time: a server that is slow to answer is not fetch more for it."""
        if not any(worker.group == "look" and worker.is_running for worker in self.workers):
            self.run_worker(self._look, group="look")

    async def _look(self) -> None:
        self._shot = await self._server.look()
        self._draw()

    def _draw(self) -> None:
        """Not while the screen is being taken down: an answer may come as late as that."""
        if self._shot is not None and self._picture.is_attached and self.is_running:
            width = max(1, self.size.width - MARGIN)
            self._picture.update(drawn(self._shot, width))

    def action_ask(self, name: str) -> None:
        act = next(act for act in ACTS if act.name == name)
        if act in self._at_work:  # a second drain would go on where the first one's end is undone
            return self.notify("It is still at work.", title=act.name, timeout=TELL_S)
        self.push_screen(Confirm(act.question), partial(self._answered, act))

    def _answered(self, act: Act, is_yes: bool | None) -> None:
        if is_yes:
            self._at_work.append(act)
            self.run_worker(partial(self._do, act), group="acts")

    async def _do(self, act: Act) -> None:
        try:
            told = await self._server.do(act)
        except SwarmError as error:
            self.notify(
                error.detail, title=act.name, severity="error", timeout=TELL_S, markup=False
            )
        else:
            self.notify(told, title=act.name, timeout=TELL_S, markup=False)
        finally:
            self._at_work.remove(act)

    def action_leave(self) -> None:
        """Who says it again to the question means it."""
        is_asked = isinstance(self.screen, Confirm) and self.screen.question == LEAVE
        if is_asked or not any(act.name == "drain" for act in self._at_work):
            return self.exit()
        self.push_screen(Confirm(LEAVE), lambda is_yes: self.exit() if is_yes else None)
