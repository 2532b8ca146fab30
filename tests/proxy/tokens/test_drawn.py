"""The page on a terminal and as HTML: everything told, nothing that a model said obeyed."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from fakevllm.tokens import html, terminal
from fakevllm.tokens.colours import By
from fakevllm.tokens.page import Page
from tests.proxy.tokens import pages
from tests.proxy.tokens.pages import TEXTS

VOID = {"meta", "input"}


def drawn(
    page: Page, by: By = By.ADVANTAGE, *, has_shades: bool = True, colours: bool = False
) -> str:
    console = Console(
        file=io.StringIO(),
        width=100,
        force_terminal=colours,
        color_system="truecolor" if colours else None,
    )
    console.print(terminal.drawn(page, TEXTS, by, has_shades=has_shades))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Reader(HTMLParser):
    """Fails for a tag that is closed where it was not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: Page, by: By = By.ADVANTAGE) -> Reader:
    reader = Reader()
    reader.feed(html.written(page, TEXTS, by))
    reader.close()
    assert reader.open == []
    return reader


def test_a_group_is_its_prompt_once_and_each_answer_with_reward_and_advantage() -> None:
    text = drawn(pages.page(0.5, -0.25))
    assert text.count("<|user|>Sum?⏎") == 1
    assert text.count(" It is 8") == 2
    assert "sibling 0, reward 1, advantage +0.5, served" in text
    assert "sibling 1, reward 1, advantage -0.25" in text


def test_one_answer_has_a_table_of_its_tokens() -> None:
    rows = [line.split() for line in drawn(pages.page(0.5)).splitlines()]
    assert ["id", "text", "mask", "logprob", "advantage"] in rows
    assert ["3", "It", "1", "-0.5000", "+0.5000"] in rows
    assert ["4", "is", "8", "1", "0.0000", "+0.5000"] in rows


@pytest.mark.parametrize("has_shades", [True, False])
@pytest.mark.parametrize("by", list(By))
def test_tokens_stand_on_the_colour_of_what_is_asked_for(by: By, has_shades: bool) -> None:
    text = drawn(pages.page(0.5), by, has_shades=has_shades, colours=True)
    grounds = set(re.findall(r"\[[0-9;]*?(4[1-8][0-9;]*)m", text))
    if has_shades:
        assert any(ground.startswith("48;2;") for ground in grounds)
    else:
        assert grounds & {"42", "43"}


def test_what_could_drive_a_terminal_is_not_printed() -> None:
    assert "\x1b" not in drawn(pages.page(0.5, ids=(6, 5)))


def test_a_token_without_a_text_is_its_id() -> None:
    assert "[99]" in drawn(pages.page(0.5, ids=(99, 3)))
    assert "[99]" in read(pages.page(0.5, ids=(99, 3))).text


def test_the_html_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    reader = read(pages.page(0.5, -0.25))
    assert not reader.tags & {"script", "link", "img", "iframe"}
    written = html.written(pages.page(0.5), TEXTS, By.ADVANTAGE)
    assert "http:" not in written and "https:" not in written and "url(" not in written
    assert "default-src 'none'" in written


def test_what_a_model_said_is_text_on_the_html_page() -> None:
    reader = read(pages.page(0.5, ids=(5, 3)))
    assert "<script>alert(1)</script>" in reader.text
    assert "script" not in reader.tags


def test_every_number_is_on_the_html_page() -> None:
    written = html.written(pages.page(0.5, -0.25), TEXTS, By.LOGPROB)
    assert 'title="id 3, logprob -0.5000, advantage +0.5000, in the loss"' in written
    assert "<td>3</td>" in written and "<td>-0.2500</td>" in written
    assert 'id="logprob" checked' in written


def test_notes_are_told_on_both() -> None:
    page = pages.page(0.5)
    page.notes.append("no texts & why")
    assert "no texts & why" in drawn(page)
    assert "no texts & why" in read(page).text
