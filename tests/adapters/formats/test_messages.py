from typing import Any

import pytest

from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.messages.schema import MalformedBody
from tests.adapters.formats.messages_bodies import (
    COUNT,
    FUNCTION,
    MESSAGES,
    PNG,
    PNG_PART,
    TOOL,
    Json,
    chat_body_of,
    messages_of,
    opened,
    result,
    text,
    user,
)


def test_a_plain_request_is_translated_to_chat() -> None:
    assert chat_body_of() == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
    }


def test_sampling_fields_and_vllms_own_fields_get_their_chat_names() -> None:
    same: Json = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "cache_salt": "s"}
    same["chat_template_kwargs"] = {"enable_thinking": False}
    assert chat_body_of(stop_sequences=["END"], **same) == chat_body_of() | same | {"stop": ["END"]}


def test_a_stream_requests_usage_in_every_chunk() -> None:
    streamed = opened(stream=True)
    assert streamed.streamed
    assert streamed.body["stream"] is True
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    assert streamed.body["stream_options"] == wanted
    assert not opened(stream=None).streamed


@pytest.mark.parametrize(
    "field",
    [
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"ec_transfer_params": {"a": 1}},
        {"metadata": {"user_id": "u"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"context_management": {"edits": []}},
        {"return_token_ids": True},
        {"n": 3},
        {"cache_control": {"type": "ephemeral"}},
    ],
)
def test_fields_that_vllm_ignores_or_apps_may_not_set_are_left_out(field: Json) -> None:
    assert chat_body_of(**field) == chat_body_of()


SYSTEMS: list[tuple[Any, str]] = [
    ("be brief", "be brief"),
    ([text("be ", cache_control={"type": "ephemeral"}), text("brief")], "be brief"),
    ([text("x-anthropic-billing-header: cch=1"), text("brief")], "brief"),
]


@pytest.mark.parametrize(("system", "expected"), SYSTEMS)
def test_the_system_prompt_is_the_first_message(system: Any, expected: str) -> None:
    assert messages_of(user("hi"), system=system) == [
        {"role": "system", "content": expected},
        user("hi"),
    ]


@pytest.mark.parametrize("system", ["", [], None, [text("")]])
def test_an_empty_system_prompt_gives_no_system_message(system: Any) -> None:
    assert messages_of(user("hi"), system=system) == [user("hi")]


def test_later_system_messages_are_joined_to_the_first() -> None:
    inline: Json = {"role": "system", "content": [text(" And kind.")]}
    billed: Json = {"role": "system", "content": "x-anthropic-billing-header: cch=1"}
    assert messages_of(user("a"), inline, user("b"), billed, system="Be brief.") == [
        {"role": "system", "content": "Be brief. And kind."},
        user("a"),
        user("b"),
    ]


def test_a_single_text_is_a_string_and_several_blocks_are_parts() -> None:
    one, several = messages_of(user([text("a")]), user([text("a"), text("b"), PNG]))
    assert one == user("a")
    assert several == user([text("a"), text("b"), PNG_PART])


def test_an_image_by_url_keeps_its_url() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    (message,) = messages_of(user([image]))
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]


def test_an_assistant_message_keeps_reasoning_text_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "opaque"},
        text("let me see"),
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"left": "ä"}},
        {"type": "tool_use", "id": "t2", "name": "now"},
    ]
    (message,) = messages_of({"role": "assistant", "content": blocks})
    assert message == {
        "role": "assistant",
        "reasoning": "hm",
        "tool_calls": [
            {
                "id": "t1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"left": "\\u00e4"}'},
            },
            {"id": "t2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
        "content": "let me see",
    }


RESULTS: list[tuple[Any, str]] = [
    ("7", "7"),
    (None, ""),
    ([], ""),
    ([text("7"), text("8")], "7\n8"),
]


@pytest.mark.parametrize(("content", "expected"), RESULTS)
def test_a_tool_result_is_a_message_of_its_own(content: Any, expected: str) -> None:
    assert messages_of(user([result(content, is_error=True)])) == [
        {"role": "tool", "tool_call_id": "t1", "content": expected}
    ]


def test_tool_results_precede_the_users_text_and_their_images_follow_each() -> None:
    turn = user([text("go on"), result([PNG, text("seen")]), result("8")])
    assert messages_of(turn) == [
        {"role": "tool", "tool_call_id": "t1", "content": "seen"},
        user([PNG_PART]),
        {"role": "tool", "tool_call_id": "t1", "content": "8"},
        user("go on"),
    ]


def test_tool_references_are_passed_to_the_chat_template() -> None:
    found = [{"type": "tool_reference", "tool_name": "add"}]
    _, references = messages_of(user([result(found)]))
    assert references["content"] == [{"type": "tool_reference", "name": "add"}]


def test_a_tool_result_in_an_assistant_message_is_text() -> None:
    (message,) = messages_of({"role": "assistant", "content": [result("7")]})
    assert message["content"] == "Tool result: 7"


def test_tools_become_functions_and_the_default_choice_is_auto() -> None:
    chat = chat_body_of(tools=[TOOL])
    assert chat["tools"] == [{"type": "function", "function": FUNCTION}]
    assert chat["tool_choice"] == "auto"


def test_a_tool_without_description_and_type_is_completed_as_by_vllm() -> None:
    (tool,) = chat_body_of(tools=[{"name": "now", "input_schema": {"properties": {}}}])["tools"]
    assert tool["function"] == {
        "name": "now",
        "description": None,
        "parameters": {"properties": {}, "type": "object"},
    }


CHOICES: list[tuple[Json, Any]] = [
    ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
    ({"type": "any"}, "required"),
    ({"type": "none"}, "none"),
    ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_a_tool_choice_is_translated_to_chat(choice: Json, expected: Any) -> None:
    assert chat_body_of(tools=[TOOL], tool_choice=choice)["tool_choice"] == expected


@pytest.mark.parametrize("tools", [None, []])
def test_an_empty_list_of_tools_is_left_out_with_its_choice(tools: Any) -> None:
    assert chat_body_of(tools=tools, tool_choice={"type": "auto"}) == chat_body_of()
    with pytest.raises(NotTranslated, match="none is offered"):
        opened(tools=tools, tool_choice={"type": "any"})


def test_output_format_and_effort_become_response_format_and_reasoning_effort() -> None:
    schema = {"type": "object"}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    chat = chat_body_of(output_config=config)
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "json_schema", "schema": schema},
    }
    assert chat["reasoning_effort"] == "low"


def test_a_body_that_vllm_refuses_is_not_translated_and_has_vllms_error() -> None:
    with pytest.raises(MalformedBody) as caught:
        MESSAGES.open({"model": "m", "messages": [user("hi")]}, EngineInfo())
    error = caught.value.error
    assert error is not None
    assert error.status == 400
    assert error.body["error"] == {
        "message": "1 validation error:\n  {'type': 'missing', 'loc': 'body.max_tokens', "
        "'msg': 'Field required', 'input': '<dict of 2 items>'}",
        "type": "Bad Request",
        "param": "body.max_tokens",
        "code": 400,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"model": ""},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [user([{"type": "document", "source": {}}])]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool"}},
        {"messages": [user([result([{"type": "text", "text": 7}])])]},
        {"messages": [user([result([{"type": "image", "source": "x"}])])]},
    ],
)
def test_a_body_that_cannot_be_translated_raises_not_translated(fields: Json) -> None:
    with pytest.raises(NotTranslated):
        opened(**fields)


def test_siblings_and_questions_are_those_of_chat() -> None:
    chat = chat_body_of(system="s", messages=[user([text("first")]), user("last")])
    assert (MESSAGES.opening(chat), MESSAGES.question(chat)) == ("first", "last")
    assert MESSAGES.sibling_body(chat, 1, 1.0)["temperature"] == 1.0


def test_a_count_of_tokens_is_translated_to_tokenize() -> None:
    question = {"model": "m", "messages": [user([text("a")])], "system": "s", "tools": [TOOL]}
    exchange = COUNT.open(question | {"tool_choice": {"type": "auto"}}, EngineInfo())
    assert exchange.body == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, user("a")],
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    assert not exchange.streamed
    raw = b'{"count":10,"max_model_len":256,"tokens":[1],"token_strs":null}'
    expected = b'{"input_tokens":10,"context_management":{"original_input_tokens":10}}'
    assert exchange.answer(raw) == expected
    with pytest.raises(ValueError, match="no count"):
        exchange.answer(b"{}")
