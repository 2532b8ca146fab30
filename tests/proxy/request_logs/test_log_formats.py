"""Requests are found in logs of OpenAI's formats."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.admission.row_requests import request_of
from fakevllm.request_logs import log_formats
from fakevllm.request_logs.log_formats import NotImported, entries_of, row_of
from fakevllm_adapters.protocol.swarm import Task

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "2+2?"}
ANSWER: Json = {"role": "assistant", "content": "4"}
RESPONSE: Json = {"object": "chat.completion", "choices": [{"index": 0, "message": ANSWER}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ROW: Json = {"question": "2+2?", "messages": [USER]}


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(log_formats)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        ({"model": "m", "messages": [USER], "temperature": 0.2, "n": 3, "stream": True}, ROW),
        ({"messages": [USER], "tools": TOOLS, "stop": None}, ROW | {"tools": TOOLS}),
        ({"request": {"messages": [USER]}, "response": RESPONSE}, ROW | {"answer": "4"}),
        ({"request": {"messages": [USER]}, "response": None}, ROW),
        ({**RESPONSE, "messages": [USER], "metadata": {}}, ROW | {"answer": "4"}),
        ({"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": [USER]}}, ROW),
        ({"custom_id": "1", "url": "/v1/responses", "body": {"input": "2+2?"}}, ROW),
        ({"model": "m", "input": [USER]}, ROW),
        ({"messages": [USER, ANSWER | {"weight": 1}]}, ROW | {"answer": "4"}),
    ],
)
def test_an_entry_of_each_format_gives_a_row(entry: Json, row: Json) -> None:
    assert row_of(entry) == row


def test_earlier_turns_and_tool_calls_are_part_of_the_prompt() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    row = row_of({"messages": [USER, called | {"weight": 0}, result, ANSWER], "tools": TOOLS})
    assert row["messages"] == [USER, called, result]
    assert row["question"] == "2+2?"


def test_the_row_is_sent_as_the_request_was() -> None:
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 5}
    row = row_of(body | {"temperature": 0.0})
    sent = request_of(Task(task_id="1", main_query=row["question"], metadata=row))
    assert sent == body


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (7, "no_request"),
        ({}, "no_request"),
        (RESPONSE, "no_messages"),
        ({"messages": []}, "no_messages"),
        ({"messages": [ANSWER]}, "no_messages"),
        ({"messages": ["Hi"]}, "no_messages"),
        ({"messages": [USER, ANSWER, ANSWER]}, "continued_answer"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "no_user_text"),
        ({"url": "/v1/embeddings", "body": {"input": "Hi"}}, "other_route"),
        ({"url": "/v1/completions", "body": {"prompt": "Hi"}}, "other_route"),
        ({"input": "And?", "previous_response_id": "resp_1"}, "previous_response"),
    ],
)
def test_entries_without_a_usable_request_are_skipped(entry: object, reason: str) -> None:
    with pytest.raises(NotImported, match=f"^{reason}$"):
        row_of(entry)


NAMES = [
    "messages",
    "input",
    "request",
    "response",
    "body",
    "url",
    "role",
    "content",
    "type",
    "choices",
    "message",
    "tools",
    "object",
    "data",
    "user",
    "text",
    "instructions",
]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(NAMES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_no_line_breaks_the_import(value: object) -> None:
    for entry in entries_of(value):
        try:
            row = row_of(entry)
        except NotImported:
            continue
        assert row["question"].strip() and row["messages"]
