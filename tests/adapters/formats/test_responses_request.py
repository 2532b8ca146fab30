from typing import Any

import pytest

from fakevllm_adapters.formats.base import EngineInfo, Json, NotTranslated
from fakevllm_adapters.formats.responses.input import messages_of, with_history
from fakevllm_adapters.formats.responses.tools import CallName, tools_of
from tests.adapters.formats.responses_exchanges import (
    NEW,
    OLD,
    RESPONSES,
    text_item,
)

LOOK: Json = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def chat_request_of(engine: EngineInfo = NEW, **fields: Any) -> Json:
    return RESPONSES.open({"input": "hi", **fields}, engine).body


def assistant_item(text: str) -> Json:
    part: Json = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": [part]}


def thought(text: str) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def called(call_id: str, arguments: str = "{}") -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": arguments}


def test_a_text_input_is_one_user_message_after_the_instructions() -> None:
    assert chat_request_of(instructions="be brief")["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_the_items_of_an_answer_form_one_assistant_message() -> None:
    items = [
        text_item("developer", "a", "b"),
        {"role": "user", "content": "go"},
        thought("hm"),
        assistant_item("I look"),
        called("c1", '{"a": 1}'),
        called("c2"),
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": text_item("x", "8")["content"]},
    ]
    function = {"name": "look", "arguments": '{"a": 1}'}
    other = {"name": "look", "arguments": "{}"}
    assert messages_of(None, items) == [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "I look",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": other},
            ],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "tool", "content": [{"type": "text", "text": "8"}], "tool_call_id": "c2"},
    ]


def test_two_texts_of_the_assistant_are_two_messages() -> None:
    assert messages_of(None, [assistant_item("a"), assistant_item("b")]) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_an_image_keeps_its_url() -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    (message,) = messages_of(None, [{"role": "user", "content": [part]}])
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    ]


def test_an_unfinished_last_answer_is_continued() -> None:
    chat = chat_request_of(input=[assistant_item("The") | {"status": "in_progress"}])
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat_request_of(input=[assistant_item("The")])


UNTRANSLATED: list[Json] = [
    {"background": True},
    {"previous_response_id": "resp_1"},
    {"prompt": {"id": "pmpt_1"}},
    {"enable_response_messages": True},
    {"input": None},
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]},
    {"input": [{"role": "tool", "content": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    {
        "input": [
            assistant_item("a")
            | {"content": assistant_item("a")["content"] + assistant_item("b")["content"]}
        ]
    },
    {"input": [{"type": "function_call", "name": "look", "arguments": "{}"}]},
    {"input": [thought("a") | {"encrypted_content": "xyz"}]},
    {"input": [7]},
    {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"input": [called("c1") | {"status": "done"}]},
    {"background": None},
    {"temperature": "hot"},
    {"truncation": None},
    {"include": ["everything"]},
    {"metadata": {"a": 1}},
    {"reasoning": {"effort": "total"}},
    {"text": {"format": {"type": "xml"}}},
    {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
    {"tools": [{"type": "teleport"}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "mcp"}]},
    {"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}},
    {"tools": [LOOK], "tool_choice": {"type": "web_search_preview"}},
    {"tools": [LOOK], "tool_choice": None},
    {"tool_choice": "required"},
]


@pytest.mark.parametrize("fields", UNTRANSLATED, ids=str)
def test_a_request_that_chat_cannot_express_raises_not_translated(fields: Json) -> None:
    with pytest.raises(NotTranslated):
        chat_request_of(**fields)


def test_an_unknown_previous_response_has_vllms_404() -> None:
    with pytest.raises(NotTranslated) as reason:
        chat_request_of(previous_response_id="resp_q")
    error = reason.value.error
    assert error is not None and (error.status, error.body["error"]) == (
        404,
        {
            "message": "Response with id 'resp_q' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": 404,
        },
    )


def test_the_reason_has_names_of_fields_and_no_values() -> None:
    with pytest.raises(NotTranslated) as reason:
        chat_request_of(temperature="secret", metadata={"a": 1})
    assert str(reason.value) == "the value of metadata, temperature"


def problem(kind: str, place: str, message: str, value: str, more: str = "") -> str:
    """Return the text of vLLM's error with one problem."""
    line = (
        f"{{'type': '{kind}', 'loc': 'body.{place}', 'msg': {message!r}, 'input': {value}{more}}}"
    )
    return f"1 validation error:\n  {line}"


REFUSED: list[tuple[Json, str, str]] = [
    (
        {"input": ...},
        "body.input",
        problem("missing", "input", "Field required", "'<dict of 2 items>'"),
    ),
    (
        {"input": 5},
        "body.input",
        "2 validation errors:\n"
        "  {'type': 'string_type', 'loc': 'body.input', 'msg': 'Input should be a valid string', "
        "'input': 5}\n"
        "  {'type': 'list_type', 'loc': 'body.input', 'msg': 'Input should be a valid list', "
        "'input': 5}",
    ),
    (
        {"max_output_tokens": "x"},
        "body.max_output_tokens",
        problem(
            "int_parsing",
            "max_output_tokens",
            "Input should be a valid integer, unable to parse string as an integer",
            "'x'",
        ),
    ),
    (
        {"metadata": {"a": 1}},
        "body.metadata.a",
        problem("string_type", "metadata.a", "Input should be a valid string", "1"),
    ),
    (
        {"truncation": "some"},
        "body.truncation",
        problem(
            "literal_error",
            "truncation",
            "Input should be 'auto' or 'disabled'",
            "'some'",
            """, 'ctx': {'expected': "'auto' or 'disabled'"}""",
        ),
    ),
    (
        {"reasoning": 5},
        "body.reasoning",
        problem(
            "model_attributes_type",
            "reasoning",
            "Input should be a valid dictionary or object to extract fields from",
            "5",
        ),
    ),
    (
        {"tools": [{"type": "function"}]},
        "body.tools.0.FunctionTool.name",
        problem("missing", "tools.0.FunctionTool.name", "Field required", "'<dict of 1 items>'"),
    ),
    (
        {"input": [{"type": "function_call", "name": "look", "arguments": "{}"}]},
        "body.input",
        "2 validation errors:\n"
        "  {'type': 'string_type', 'loc': 'body.input', 'msg': 'Input should be a valid string', "
        "'input': '<list of 1 items>'}\n"
        "  {'type': 'missing', 'loc': 'body.input.0.ResponseFunctionToolCallParam.call_id', "
        "'msg': 'Field required', 'input': '<dict of 3 items>'}",
    ),
    (
        {"tool_choice": "required"},
        "tool_choice",
        "Tool choice 'required' must be specified with 'tools' parameter. (parameter=tool_choice)",
    ),
    (
        {"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}},
        "tool_choice",
        "Tool choice 'function' not found in 'tools' parameter. (parameter=tool_choice)",
    ),
    (
        {"cache_salt": ""},
        "cache_salt",
        "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
    ),
    ({"prompt": {"id": "p"}}, "prompt", "prompt template is not supported (parameter=prompt)"),
    (
        {"background": True, "store": False},
        "background",
        "background can only be used when `store` is true (parameter=background)",
    ),
    (
        {"background": True},
        "background",
        "This vLLM engine does not support `store=True` and therefore does not support the "
        "background mode. To enable these features, set the environment variable "
        "`VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server.",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "Cannot specify both structured_outputs and text.format (parameter=structured_outputs)",
    ),
    (
        {"enable_response_messages": True},
        "enable_response_messages",
        "`enable_response_messages` is not supported by this engine. "
        "(parameter=enable_response_messages)",
    ),
]
"""Fields, and the param and message of vLLM's error. The last error is one of the engines without a
Responses route."""


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=[str(r[0]) for r in REFUSED])
def test_a_request_that_vllm_refuses_has_vllms_error(
    fields: Json, param: str, message: str
) -> None:
    body = {"model": "m", "input": "hi"} | fields
    with pytest.raises(NotTranslated) as reason:
        RESPONSES.open({key: value for key, value in body.items() if value is not ...}, NEW)
    error = reason.value.error
    assert error is not None and error.status == 400
    assert (error.body["error"]["param"], error.body["error"]["message"]) == (param, message)


def test_hosted_tools_are_repeated_and_not_offered() -> None:
    chat = chat_request_of(tools=[{"type": "web_search"}, LOOK, {"type": "local_shell"}])
    function = {"name": "look", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert "tools" not in chat_request_of(tools=[{"type": "web_search"}])


def test_a_tool_in_a_namespace_is_offered_with_both_names_and_called_by_its_own() -> None:
    space = {"type": "namespace", "name": "eye", "description": "d", "tools": [LOOK]}
    tools = tools_of([space])
    assert [tool["function"]["name"] for tool in tools.functions] == ["eye__look"]
    assert tools.call_name("eye__look") == CallName("look", "eye")
    (message,) = messages_of(None, [called("c1") | {"namespace": "eye"}])
    assert message["tool_calls"][0]["function"]["name"] == "eye__look"


def test_a_repeated_tool_has_every_key_of_its_type() -> None:
    (tool,) = tools_of([LOOK | {"mine": 1}]).repeated
    assert list(tool) == [
        *("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading"),
        *("description", "output_schema", "mine"),
    ]


CHOICES: list[tuple[Any, Any]] = [
    ("auto", "auto"),
    ("none", "none"),
    ("required", "required"),
    ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
]


@pytest.mark.parametrize(("tool_choice", "chosen"), CHOICES)
def test_a_tool_choice_is_translated_to_chat(tool_choice: Any, chosen: Any) -> None:
    assert chat_request_of(tools=[LOOK], tool_choice=tool_choice)["tool_choice"] == chosen


def test_custom_tools_raise_not_translated_if_the_engine_offers_them() -> None:
    tools = [{"type": "custom", "name": "patch"}]
    assert "tools" not in chat_request_of(OLD, tools=tools)
    with pytest.raises(NotTranslated):
        chat_request_of(NEW, tools=tools)


def test_parallel_tool_calls_is_passed_on_if_vllm_honours_it() -> None:
    fields: Json = {"tools": [LOOK], "parallel_tool_calls": False}
    assert chat_request_of(NEW, **fields)["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in chat_request_of(OLD, **fields)


FIELDS: list[tuple[Json, Json]] = [
    ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
    ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ({"truncation": "auto"}, {"truncate_prompt_tokens": -1}),
    ({"seed": 3, "stop": ["x"], "top_k": 4}, {"seed": 3, "stop": ["x"], "top_k": 4}),
    ({"include_reasoning": False}, {"include_reasoning": False}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}},
            }
        },
    ),
    (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 2},
    ),
    ({"top_logprobs": 2}, {}),
    (
        {"stream": True},
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (
        {"n": 3, "user": "me", "metadata": {"a": "b"}, "store": False, "best_of": 2, "echo": True},
        {},
    ),
]


@pytest.mark.parametrize(("fields", "added"), FIELDS, ids=str)
def test_each_field_is_translated_as_by_vllm(fields: Json, added: Json) -> None:
    assert chat_request_of(**fields) == {"messages": [{"role": "user", "content": "hi"}]} | added


def test_the_earlier_conversation_precedes_the_input() -> None:
    answer: Json = {
        "role": "assistant",
        "reasoning": "hm",
        "content": "I look",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    }
    first: Json = {"input": "go", "instructions": "be brief"}
    second: Json = {
        "input": [{"type": "function_call_output", "call_id": "c1", "output": "7"}],
        "previous_response_id": "resp_1",
    }
    body: Json = {"input": "and?", "previous_response_id": "resp_2", "instructions": "be kind"}
    earlier = [(first, answer), (second, {"role": "assistant", "content": "7"})]
    messages = RESPONSES.open(body, NEW, earlier).body["messages"]
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]
    assert messages[0]["content"] == "be kind" and messages[-1]["content"] == "and?"
    assert messages[2] == answer
    assert "previous_response_id" not in with_history(body, earlier)


def test_token_ids_are_requested_if_logprobs_would_be_missing_without_them() -> None:
    fields: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    assert chat_request_of(OLD, stream=True, **fields)["return_token_ids"] is True
    for chat in (chat_request_of(OLD, **fields), chat_request_of(NEW, stream=True, **fields)):
        assert "return_token_ids" not in chat
