"""Messages are stored without their text and tool calls, and the view returns them unchanged."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.stored_messages import MIN_CHARS, stored_message
from fakevllm_runtime.migrations import migrate
from tests.proxy.ledger.ledger_cases import group, rows, sibling

LONG = 'a line with "quotes", a \\ and größere Zeichen: 😀\n' * 4
CALLS = [{"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"a": "b"}'}}]
MESSAGE = {"role": "assistant", "content": LONG, "tool_calls": CALLS, "refusal": None}


def encoded(value: Any) -> str:
    return orjson.dumps(value).decode()


CHARS = st.sampled_from(
    ["a", '"', "\\", "\n", "\t", "\0", "\x01", "\x1f", "\x7f", "é", "😀", "\u2028"]
)
TEXTS = st.lists(CHARS, max_size=80).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=20, max_size=60
)
ENCODERS = st.sampled_from([encoded, json.dumps, lambda value: json.dumps(value, indent=1)])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that stores a message, and returns what the view has."""
    path = tmp_path_factory.mktemp("messages") / "ledger.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as db:
        migrate(db, MIGRATIONS, "the file")
    engine.dispose()
    with closing(sqlite3.connect(path)) as db:

        def show(message_json: str | None, text: str | None, calls: str | None) -> Any:
            db.execute("DELETE FROM sibling_rows")
            stored, *places = stored_message(message_json, text, calls)
            db.execute(
                'INSERT INTO sibling_rows (group_id, "index", served, best, status, trained, '
                "message_json, text, tool_calls_json, text_at, tool_calls_at) "
                "VALUES ('g', 0, 1, 1, 200, 0, ?, ?, ?, ?, ?)",
                (stored, text, calls, *places),
            )
            (row,) = db.execute("SELECT message_json, text, tool_calls_json FROM siblings")
            return row

        yield show


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.none() | TEXTS, ENCODERS, st.booleans())
@example(LONG, LONG, encoded, True)
def test_the_view_returns_each_message_as_it_was_recorded(
    shown: Callable[..., Any],
    content: str,
    other: str | None,
    encode: Callable[[Any], str],
    calls_first: bool,
) -> None:
    keys = ["tool_calls", "content"] if calls_first else ["content", "tool_calls"]
    calls = [{"function": {"name": "f", "arguments": other}}]
    parts = {"content": content, "tool_calls": calls}
    message_json = encode({"role": "assistant"} | {key: parts[key] for key in keys})
    calls_json = encode(calls)
    for recorded in (
        (message_json, content, calls_json),
        (message_json, other, None),
        (content, content, other),
        (encode(content) * 3, content, encode(content)),
        (None, content, calls_json),
    ):
        assert shown(*recorded) == recorded


def test_text_and_tool_calls_are_left_out() -> None:
    stored, text_at, calls_at = stored_message(encoded(MESSAGE), LONG, encoded(CALLS))
    assert stored == '{"role":"assistant","content":,"tool_calls":,"refusal":null}'
    assert (text_at, calls_at) == (30, 44)


def test_a_message_with_another_text_or_a_short_one_is_stored_whole() -> None:
    short = "x" * (MIN_CHARS - 3)
    for text in (LONG + "!", short, "", None, "\x01" * MIN_CHARS, "\ud800" * MIN_CHARS):
        content = None if text and "\ud800" in text else text
        message_json = encoded({"content": content if text != LONG + "!" else LONG})
        assert stored_message(message_json, text, None) == (message_json, None, None)


def test_sqlite_quotes_each_character_as_orjson_does() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        for first in range(0, 0x110000, 1024):
            chars = map(chr, range(first, first + 1024))
            text = "".join(one for one in chars if not "\ud800" <= one <= "\udfff")
            assert db.execute("SELECT json_quote(?)", (text,)).fetchone() == (encoded(text),)


def test_the_ledger_stores_a_long_text_once(ledger: Ledger, path: Path) -> None:
    one = replace(
        sibling(0, 1.0, served=True),
        message_json=encoded(MESSAGE),
        text=LONG,
        tool_calls_json=encoded(CALLS),
    )
    ledger.record(replace(group(), siblings=[one]))
    assert ledger.drain()
    found = ledger.group("g1")
    assert found is not None and list(found.siblings) == [one]
    assert rows(path, "SELECT message_json FROM siblings") == [(encoded(MESSAGE),)]
    ((size,),) = rows(path, "SELECT length(message_json) FROM sibling_rows")
    assert isinstance(size, int) and size < 70
