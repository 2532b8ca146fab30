"""The page on a terminal and as HTML: it is complete, and the model's text is escaped."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from fakevllm.tokens.colours import ColourBy
from fakevllm.tokens.detokenizer import TokenTexts
from fakevllm.tokens.html import render_html
from fakevllm.tokens.page import CallTokens, Page, Sample, Token
from fakevllm.tokens.terminal import render_page
from tests.proxy.markup import MARKUP
from tests.proxy.tokens import pages
from tests.proxy.tokens.pages import TEXTS

VOID_TAGS = {"meta", "input"}
NUM_SHOWN = 11
"""Number of times that a text is on the HTML page if all texts of the page are this text: in its
title, heading, facts, question, note, both headings of samples, the call's notes, prompt, answer
and table."""


def terminal_text(
    page: Page, by: ColourBy = ColourBy.ADVANTAGE, *, has_shades: bool = True, colours: bool = False
) -> str:
    console = Console(
        file=io.StringIO(),
        width=100,
        force_terminal=colours,
        color_system="truecolor" if colours else None,
    )
    console.print(render_page(page, TEXTS, by, has_shades=has_shades))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class StrictParser(HTMLParser):
    """A parser that fails if a tag is closed that is not the innermost open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parse_html(
    page: Page, by: ColourBy = ColourBy.ADVANTAGE, texts: TokenTexts = TEXTS
) -> StrictParser:
    parser = StrictParser()
    parser.feed(render_html(page, texts, by))
    parser.close()
    assert parser.open_tags == []
    return parser


def test_a_group_shows_its_prompt_once_and_each_answer_with_reward_and_advantage() -> None:
    text = terminal_text(pages.page(0.5, -0.25))
    assert text.count("<|user|>Sum?⏎") == 1
    assert text.count(" It is 8") == 2
    assert "sibling 0, reward 1, advantage +0.5, served" in text
    assert "sibling 1, reward 1, advantage -0.25" in text


def test_a_single_sibling_has_a_table_of_its_tokens() -> None:
    rows = [line.split() for line in terminal_text(pages.page(0.5)).splitlines()]
    assert ["id", "text", "mask", "logprob", "advantage"] in rows
    assert ["3", "It", "1", "-0.5000", "+0.5000"] in rows
    assert ["4", "is", "8", "1", "0.0000", "+0.5000"] in rows


@pytest.mark.parametrize("has_shades", [True, False])
@pytest.mark.parametrize("by", list(ColourBy))
def test_tokens_have_a_background_colour(by: ColourBy, has_shades: bool) -> None:
    text = terminal_text(pages.page(0.5), by, has_shades=has_shades, colours=True)
    backgrounds = set(re.findall(r"\[[0-9;]*?(4[1-8][0-9;]*)m", text))
    if has_shades:
        assert any(background.startswith("48;2;") for background in backgrounds)
    else:
        assert backgrounds & {"42", "43"}


def test_terminal_control_sequences_are_not_printed() -> None:
    assert "\x1b" not in terminal_text(pages.page(0.5, ids=(6, 5)))


def test_a_token_without_a_text_is_shown_as_its_id() -> None:
    assert "[99]" in terminal_text(pages.page(0.5, ids=(99, 3)))
    assert "[99]" in parse_html(pages.page(0.5, ids=(99, 3))).text


def test_the_html_page_is_complete_and_loads_no_external_resources() -> None:
    parser = parse_html(pages.page(0.5, -0.25))
    assert not parser.tags & {"script", "link", "img", "iframe"}
    html = render_html(pages.page(0.5), TEXTS, ColourBy.ADVANTAGE)
    assert "http:" not in html and "https:" not in html and "url(" not in html
    assert "default-src 'none'" in html


def test_markup_from_the_model_is_text_on_the_html_page() -> None:
    parser = parse_html(pages.page(0.5, ids=(5, 3)))
    assert "<script>alert(1)</script>" in parser.text
    assert "script" not in parser.tags


@pytest.mark.parametrize("text", MARKUP)
def test_markup_in_any_text_is_text_on_the_html_page(text: str) -> None:
    token = Token(3, True, -0.5, 0.5)
    calls = [CallTokens([Token(1, False)], [token], [text])]
    samples = [
        Sample(text, 1.0, 0.5, True, True, calls),
        Sample(text, None, None, False, False, []),
    ]
    page = Page(text, text, [text], samples, [text])
    parser = parse_html(page, texts={1: text, 3: text})
    assert parser.tags == parse_html(pages.page(0.5)).tags
    assert parser.attributes == parse_html(pages.page(0.5)).attributes
    assert parser.text.count(text) == NUM_SHOWN


def test_the_html_page_has_every_number() -> None:
    html = render_html(pages.page(0.5, -0.25), TEXTS, ColourBy.LOGPROB)
    assert 'title="id 3, logprob -0.5000, advantage +0.5000, in the loss"' in html
    assert "<td>3</td>" in html and "<td>-0.2500</td>" in html
    assert 'id="logprob" checked' in html


def test_notes_are_on_the_terminal_and_on_the_html_page() -> None:
    page = pages.page(0.5)
    page.notes.append("no texts & why")
    assert "no texts & why" in terminal_text(page)
    assert "no texts & why" in parse_html(page).text
