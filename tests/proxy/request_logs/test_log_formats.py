"""Requests are found in logs of OpenAI's and Anthropic's formats."""

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


def output(*texts: str) -> Json:
    """Return the response to a Responses request, whose reasoning is not part of the answer."""
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    parts = [{"type": "output_text", "text": text} for text in texts]
    message = {"type": "message", "role": "assistant", "content": parts}
    call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"}
    return {"object": "response", "output": [reasoning, message, call]}


ANTHROPIC: Json = {"model": "claude", "max_tokens": 9, "messages": [USER]}
MESSAGE: Json = {
    **{"type": "message", "role": "assistant"},
    "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "4"}],
}


@pytest.mark.parametrize(
    ("request_", "response", "answer"),
    [
        ({"input": "2+2?"}, output("4"), "4"),
        ({"input": "2+2?"}, output("It is ", "4"), "It is 4"),
        ({"input": "2+2?"}, output(), None),
        ({"input": "2+2?"}, {"error": {"message": "overloaded"}}, None),
        ({"messages": [USER]}, {"status_code": 200, "body": RESPONSE}, "4"),
        (ANTHROPIC, MESSAGE, "4"),
        (ANTHROPIC, {"type": "error", "error": {"message": "overloaded"}}, None),
    ],
)
def test_the_answer_of_a_pair_is_the_text_of_its_response(
    request_: Json, response: Json, answer: str | None
) -> None:
    row = row_of({"request": request_, "response": response})
    assert (row["question"], row.get("answer")) == ("2+2?", answer)


def test_a_stored_response_with_its_input_gives_a_row() -> None:
    assert row_of({"input": "2+2?", **output("4")}) == ROW | {"answer": "4"}


def test_a_request_that_begins_the_answer_is_no_prompt() -> None:
    begun: Json = {"messages": [USER, {"role": "assistant", "content": "It is"}]}
    with pytest.raises(NotImported, match=r"^continued_answer$"):
        row_of({"request": begun, "response": RESPONSE})


def test_the_answer_of_a_file_for_fine_tuning_may_have_parts() -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4"}]
    row = row_of({"messages": [USER, {"role": "assistant", "content": parts}]})
    assert row["answer"] == "It is 4"


def test_a_request_to_anthropics_api_becomes_a_chat_request() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}
    body: Json = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "Wait."}, use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "stop_sequences": ["END"],
        "top_k": 3,
    }
    row = row_of({"request": ANTHROPIC | body, "response": MESSAGE})
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    assert row["messages"] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
    ]
    assert row["tools"][0]["function"]["name"] == "add"
    assert (row["stop"], row["max_tokens"], row["answer"]) == (["END"], 9, "4")
    assert "top_k" not in row


@pytest.mark.parametrize(
    "entry",
    [
        {"system": "Be brief.", "messages": [USER, ANSWER]},
        {"custom_id": "1", "params": ANTHROPIC | {"system": "Be brief."}, "response": MESSAGE},
        {"url": "https://example.org/v1/messages", "body": ANTHROPIC | {"system": "Be brief."}},
    ],
)
def test_requests_to_anthropics_api_may_have_any_shape(entry: Json) -> None:
    row = row_of(entry)
    assert row["messages"] == [{"role": "system", "content": "Be brief."}, USER]
    assert row.get("answer") == (None if "url" in entry else "4")
    assert row.get("max_tokens") == (None if "custom_id" not in entry and "url" not in entry else 9)


def test_a_tool_that_anthropics_servers_run_is_a_reason() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(NotImported, match=r"^not_translated$"):
        row_of(ANTHROPIC | {"system": "Hi", "tools": [search]})


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
        ({"url": "http://[", "body": {"messages": [USER]}}, "other_route"),
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
    "system",
    "params",
    "output",
    "tool_use",
    "input_schema",
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


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/openai/deployments/d/chat/completions?api-version=1", {"messages": [USER]}),
        ("https://api.example.com/api/v3/chat/completions/", {"messages": [USER]}),
        ("https://api.example.com/openai/responses", {"input": "2+2?"}),
        ("https://api.example.com/anthropic/v1/messages", {"messages": [USER]}),
    ],
)
def test_urls_of_other_providers_are_recognised_by_their_end(url: str, body: Json) -> None:
    assert row_of({"custom_id": "1", "url": url, "body": body}) == ROW


def test_requests_with_the_old_field_functions_are_counted() -> None:
    with pytest.raises(NotImported, match="not_translated"):
        row_of({"messages": [USER], "functions": [{"name": "add"}]})
