"""Conversations are exported in the form that chat templates expect."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from fakevllm.export import conversation as module
from fakevllm.export.conversation import NotExported, chat_message, conversation_of

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "Hi"}


def call(arguments: object) -> Json:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


def test_the_arguments_of_tool_calls_are_objects() -> None:
    calls = [call(arguments) for arguments in ('{"a":1}', {"a": 1}, "", "{}", None)]
    exported = chat_message({"role": "assistant", "content": None, "tool_calls": calls})
    assert exported["content"] == ""
    arguments = [one["function"]["arguments"] for one in exported["tool_calls"]]
    assert arguments == [{"a": 1}, {"a": 1}, {}, {}, {}]


CUSTOM: Json = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "ls"}}


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([call("{")], "broken_tool_call"),
        ([call("[1]")], "broken_tool_call"),
        ([call("3")], "broken_tool_call"),
        ([call([1])], "broken_tool_call"),
        ([call("{}"), {"id": "c2", "type": "function"}], "broken_tool_call"),
        ([{"type": "function", "function": {"arguments": "{}"}}], "broken_tool_call"),
        ([{"type": "function", "function": "add"}], "broken_tool_call"),
        (["add"], "broken_tool_call"),
        ({"id": "c1"}, "broken_tool_call"),
        ([CUSTOM], "custom_tool"),
    ],
)
def test_tool_calls_without_such_a_form_are_a_reason(calls: object, reason: str) -> None:
    with pytest.raises(NotExported, match=f"^{reason}$"):
        chat_message({"role": "assistant", "tool_calls": calls})


def test_tools_and_calls_that_templates_do_not_know_are_a_reason() -> None:
    with pytest.raises(NotExported, match=r"^custom_tool$"):
        conversation_of({"messages": [USER], "tools": [{"type": "custom", "custom": {}}]})
    with pytest.raises(NotExported, match=r"^custom_tool$"):
        chat_message({"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}})


def test_reasoning_has_the_name_that_chat_templates_read() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "4", name: "2 + 2", "refusal": None}
        expected = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
        assert chat_message(message) == expected


def test_a_tool_result_keeps_the_id_of_its_call() -> None:
    message = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
    assert chat_message(message) == message


def test_tools_and_arguments_of_the_template_are_kept() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    kwargs = {"enable_thinking": False, "add_generation_prompt": False}
    exported = conversation_of({"messages": [USER], "tools": tools, "chat_template_kwargs": kwargs})
    assert exported.tools == tools
    assert exported.template_kwargs == {"enable_thinking": False}
    assert conversation_of({"messages": [USER]}).tools == []


IMAGE: Json = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
NOT_EXPORTED: list[tuple[list[Json] | None, str]] = [
    ([], "no_messages"),
    (None, "no_messages"),
    ([{"content": "Hi"}], "no_messages"),
    ([USER, {"role": "assistant", "content": "Hello"}], "continued_answer"),
    ([IMAGE], "media"),
]


@pytest.mark.parametrize(("messages", "reason"), NOT_EXPORTED)
def test_conversations_without_such_a_form_are_not_exported(messages: Any, reason: str) -> None:
    with pytest.raises(NotExported, match=f"^{reason}$"):
        conversation_of({"messages": messages})


@pytest.mark.parametrize("digits", [str(2**64), str(-(2**63) - 1), "1" + "0" * 200])
def test_integers_that_would_lose_digits_are_counted(digits: str) -> None:
    function = {"name": "add", "arguments": f'{{"a": {digits}}}'}
    call = {"type": "function", "function": function}
    with pytest.raises(NotExported, match="large_integer"):
        chat_message({"role": "assistant", "tool_calls": [call]})


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63)])
def test_integers_of_64_bits_stay_exact(number: int) -> None:
    function = {"name": "add", "arguments": f'{{"a": {number}, "b": "{10**30}"}}'}
    message = chat_message({"role": "assistant", "tool_calls": [{"function": function}]})
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": number, "b": str(10**30)}


def test_the_old_field_functions_is_no_tool_of_chat_templates() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "functions": [{"name": "f"}]}
    with pytest.raises(NotExported, match="custom_tool"):
        conversation_of(body)
