"""Render the tokens of a group or an episode as coloured text for a terminal. If a single sibling
or episode is shown, add a table of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fakevllm.runtime.terminal_text import printable
from fakevllm.tokens.colours import BAD, GOOD, SURPRISING, ColourBy, Rgb, blend, colour
from fakevllm.tokens.detokenizer import TokenTexts
from fakevllm.tokens.page import CallTokens, Page, Token, format_values, heading

BACKGROUND: Rgb = (0, 0, 0)
BASIC_COLOURS = {GOOD: "green", BAD: "red", SURPRISING: "yellow"}
"""Colours for a terminal with 16 colours."""
MIN_BASIC_STRENGTH = 0.1
"""Minimum strength of a colour on a terminal with 16 colours. Such a terminal cannot show shades,
so a token with a weaker colour is shown without colour."""
PROMPT_TOKENS = 40
"""Maximum number of a prompt's tokens that are shown. The last tokens of the prompt are shown. The
HTML page shows the whole prompt."""
LEGEND = {
    ColourBy.ADVANTAGE: "green: made more likely; red: made less likely; dim: not in the loss",
    ColourBy.LOGPROB: "orange: surprising to the model; dim: not in the loss",
}


@dataclass(frozen=True, slots=True)
class Painter:
    """A converter of tokens to coloured text. The Painter has the texts of the tokens, and the
    settings that decide their colours."""

    by: ColourBy
    texts: TokenTexts
    largest_advantage: float
    has_shades: bool

    def token_text(self, token: Token) -> Text:
        """Return the token's text with the background colour of the token. If the text is unknown,
        return the token's id in brackets.

        Line ends are kept and marked with ⏎. Other control characters are escaped.
        """
        text = self.texts.get(token.id)
        if text is None:
            return Text(f"[{token.id}] ", self._style(token))
        escaped = printable(text, keep="\n\t")
        return Text(escaped.replace("\n", "⏎\n"), self._style(token))

    def joined_texts(self, tokens: Sequence[Token]) -> Text:
        return Text().join(self.token_text(token) for token in tokens)

    def _style(self, token: Token) -> Style:
        is_dim = not token.is_trained
        token_colour = colour(token, self.by, self.largest_advantage)
        if token_colour is None:
            return Style(dim=is_dim)
        rgb, strength = token_colour
        if self.has_shades:
            red, green, blue = blend(token_colour, BACKGROUND)
            return Style(color="white", bgcolor=f"rgb({red},{green},{blue})", dim=is_dim)
        if strength < MIN_BASIC_STRENGTH:
            return Style(dim=is_dim)
        return Style(color="black", bgcolor=BASIC_COLOURS[rgb], dim=is_dim)


def render_page(
    page: Page, texts: TokenTexts, by: ColourBy, *, has_shades: bool = True
) -> RenderableType:
    """Return `page` (the tokens of a group or an episode) in a form that rich can print on a
    terminal. `has_shades` is True if the terminal has more than 16 colours, and can therefore show
    shades."""
    painter = Painter(by, texts, page.largest_advantage, has_shades)
    parts: list[RenderableType] = [Text(page.title, "bold"), Text(", ".join(page.facts), "dim")]
    if page.question:
        parts.append(Text(printable(page.question, keep="\n\t"), no_wrap=True, overflow="ellipsis"))
    last_prompt: Sequence[Token] = ()
    for sample in page.samples:
        parts.append(Rule(Text(heading(sample)), align="left", style="dim"))
        for number, call in enumerate(sample.calls):
            if len(sample.calls) > 1:
                parts.append(Text(f"call {number}, {', '.join(call.notes)}", "italic dim"))
            if call.prompt != last_prompt:  # siblings of a group have the same prompt
                parts.append(_prompt(call, painter))
            parts.append(painter.joined_texts(call.response))
            last_prompt = call.prompt
        if not sample.calls:
            parts.append(Text("no tokens are recorded", "dim"))
    if len(page.samples) == 1:
        parts += [_table(call, painter) for call in page.samples[0].calls]
    return Group(*parts, Text(""), *(Text(note, "dim") for note in (LEGEND[by], *page.notes)))


def _prompt(call: CallTokens, painter: Painter) -> Text:
    shown = call.prompt[-PROMPT_TOKENS:]
    text = Text("… " if len(shown) < len(call.prompt) else "", "dim")
    text.append_text(painter.joined_texts(shown))
    text.rstrip()
    return text


def _table(call: CallTokens, painter: Painter) -> Table:
    table = Table("id", "text", "mask", "logprob", "advantage", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "left" if column.header == "text" else "right"
    for token in call.response:
        # Appended to an empty text, so that the colour does not fill the whole cell.
        text = Text("").append_text(painter.token_text(token))
        if text.plain.endswith("\n"):
            text.right_crop(1)
        table.add_row(str(token.id), text, str(int(token.is_trained)), *format_values(token))
    return table
