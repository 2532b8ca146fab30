"""The size of a page, and the time that its JSON takes."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

from fakevllm.console.page_texts import (
    MAX_CHARS,
    MAX_INDENTED_NESTING,
    MAX_PAGE_CHARS,
    PageTexts,
)
from fakevllm.ledger.store import Ledger
from tests.proxy.console.console_rig import open_console
from tests.proxy.ledger.ledger_cases import group, sibling

MAX_SECONDS = 1.0
"""The JSON takes some milliseconds, but the machine may be busy."""


def test_the_texts_of_a_page_have_a_limit_together() -> None:
    texts = PageTexts(max_chars=10)
    assert [texts.cut("abcd"), texts.cut("efghijkl", 5)] == ["abcd", "efghi\n… (3 more characters)"]
    assert texts.json("[2]") == "[\n… (2 more characters)"
    assert texts.cut("") == "" and texts.cut("m") == "\n… (1 more characters)"


def test_json_has_indents_unless_it_is_nested_deeply() -> None:
    assert PageTexts().json('{"a":[1]}') == '{\n  "a": [\n    1\n  ]\n}'
    assert PageTexts().json("not JSON") == "not JSON"
    assert PageTexts().json(None) == ""
    nestings = (MAX_INDENTED_NESTING, MAX_INDENTED_NESTING + 1)
    flat, deep = ("[" * nesting + "]" * nesting for nesting in nestings)
    assert "\n" in PageTexts().json(flat) and PageTexts().json(deep) == deep


def test_json_that_is_nested_deeply_is_shown_quickly() -> None:
    text = "[" * 900 + ",".join("1" * 40_000) + "]" * 900
    start = time.monotonic()
    assert PageTexts().json(text) == text
    assert time.monotonic() - start < MAX_SECONDS


async def test_a_page_with_many_long_answers_has_a_limit_and_shows_each_of_them(
    path: Path, ledger: Ledger
) -> None:
    num_siblings, num_chars = 40, 190_000
    siblings = [
        replace(
            sibling(index, 0.5, served=index == 0),
            text=f"answer {index} " + "x" * num_chars,
            message_json=json.dumps({"content": "y" * num_chars}),
        )
        for index in range(num_siblings)
    ]
    ledger.record(replace(group("g1"), siblings=siblings, request_json='{"model": "the request"}'))
    assert ledger.drain()
    async with open_console(path) as rig:
        html = await rig.get("/groups/g1")
    assert MAX_CHARS < len(html) < 1.1 * MAX_PAGE_CHARS
    without_marks = re.sub("</?mark>", "", html)
    assert all(f"answer {index} xxx" in without_marks for index in range(num_siblings))
    assert "the request" in html and "more characters" in html
