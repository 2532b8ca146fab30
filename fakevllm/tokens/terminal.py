"""A page of tokens on a terminal: text in colours, and for a single answer a table as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fakevllm.runtime.terminal_text import printable
from fakevllm.tokens.colours import BAD, GOOD, SURPRISING, By, Rgb, colour, mixed
from fakevllm.tokens.page import Page, Token, Turn, headed, numbers
from fakevllm.tokens.texts import Texts

GROUND: Rgb = (0, 0, 0)
FEW_COLOURS = {GOOD: "green", BAD: "red", SURPRISING: "yellow"}
SHOWN_FROM = 0.1
"""Strength, where there are few colours and no shades of them."""
PROMPT_TOKENS = 40
"""Of a prompt, the last ones; all of it is on the HTML page."""
LEGEND = {
    By.ADVANTAGE: "green: made likelier; red: made less likely; dim: not in the loss",
    By.LOGPROB: "orange: surprising to the model; dim: not in the loss",
}


@dataclass(frozen=True, slots=True)
class Paint:
    by: By
    texts: Texts
    largest_advantage: float
    has_shades: bool

    def text(self, token: Token) -> Text:
        """Ends of lines are marked, and kept; what could drive a terminal is not."""
        text = self.texts.get(token.id)
        if text is None:
            return Text(f"[{token.id}] ", self._style(token))
        kept = printable(text, keep="\n\t")
        return Text(kept.replace("\n", "⏎\n"), self._style(token))

    def texts_of(self, tokens: Sequence[Token]) -> Text:
        return Text().join(self.text(token) for token in tokens)

    def _style(self, token: Token) -> Style:
        found = colour(token, self.by, self.largest_advantage)
        is_dim = not token.is_trained
        if found is None or (not self.has_shades and found[1] < SHOWN_FROM):
            return Style(dim=is_dim)
        if not self.has_shades:
            return Style(color="black", bgcolor=FEW_COLOURS[found[0]], dim=is_dim)
        red, green, blue = mixed(found, GROUND)
        return Style(color="white", bgcolor=f"rgb({red},{green},{blue})", dim=is_dim)


def drawn(page: Page, texts: Texts, by: By, *, has_shades: bool = True) -> RenderableType:
    """`has_shades`: whether the terminal has more than 16 colours."""
    paint = Paint(by, texts, page.largest_advantage, has_shades)
    parts: list[RenderableType] = [Text(page.title, "bold"), Text(", ".join(page.facts), "dim")]
    if page.question:
        parts.append(Text(printable(page.question, keep="\n\t"), no_wrap=True, overflow="ellipsis"))
    before: Sequence[Token] = ()
    for answer in page.answers:
        parts.append(Rule(Text(headed(answer)), align="left", style="dim"))
        for number, turn in enumerate(answer.turns):
            if len(answer.turns) > 1:
                parts.append(Text(f"call {number}, {', '.join(turn.notes)}", "italic dim"))
            if turn.prompt != before:  # siblings have the same
                parts.append(_prompt(turn, paint))
            parts.append(paint.texts_of(turn.answer))
            before = turn.prompt
        if not answer.turns:
            parts.append(Text("no tokens are known of it", "dim"))
    if len(page.answers) == 1:
        parts += [_table(turn, paint) for turn in page.answers[0].turns]
    return Group(*parts, Text(""), *(Text(note, "dim") for note in (LEGEND[by], *page.notes)))


def _prompt(turn: Turn, paint: Paint) -> Text:
    last = turn.prompt[-PROMPT_TOKENS:]
    shown = Text("… " if len(last) < len(turn.prompt) else "", "dim")
    shown.append_text(paint.texts_of(last))
    shown.rstrip()
    return shown


def _table(turn: Turn, paint: Paint) -> Table:
    table = Table("id", "text", "mask", "logprob", "advantage", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "left" if column.header == "text" else "right"
    for token in turn.answer:
        text = Text("").append_text(paint.text(token))  # its ground is not the whole cell's
        if text.plain.endswith("\n"):
            text.right_crop(1)
        table.add_row(str(token.id), text, str(int(token.is_trained)), *numbers(token))
    return table
