"""The token page and the web chat have the console's look, although they share no file with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fakevllm.console.page_renderer import STATIC
from fakevllm.tokens.colours import ColourBy
from fakevllm.tokens.html import render_html
from fakevllm.tokens.page import Page

CHAT_CSS = Path(__file__).parents[3] / "examples" / "webchat" / "page" / "chat.css"
OWN_NAMES = {"--mine"}
"""Colours that the console does not have."""
NUM_SCHEMES = 2


def schemes(css: str) -> list[dict[str, str]]:
    """Return the custom properties of a style sheet's `:root` blocks: light, then dark."""
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    return [dict(re.findall(r"(--[\w-]+): ([^;]+);", block)) for block in blocks]


def root_font(css: str) -> str:
    match = re.search(r":root \{.*?font: ([^;]+);", css, re.DOTALL)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("name", ["token page", "web chat"])
def test_the_colours_and_the_font_are_the_consoles_in_light_and_dark(name: str) -> None:
    token_page = render_html(Page("group", "", [], []), {}, ColourBy.ADVANTAGE)
    css = token_page if name == "token page" else CHAT_CSS.read_text()
    console_css = (STATIC / "console.css").read_text()
    console = schemes(console_css)
    found = schemes(css)
    assert len(console) == len(found) == NUM_SCHEMES
    for theirs, ours in zip(console, found, strict=True):
        assert {"--back", "--card", "--ink", "--soft", "--line", "--accent"} <= ours.keys()
        assert {key: theirs.get(key) for key in ours.keys() - OWN_NAMES} == {
            key: ours[key] for key in ours.keys() - OWN_NAMES
        }
    assert root_font(css) == root_font(console_css)
