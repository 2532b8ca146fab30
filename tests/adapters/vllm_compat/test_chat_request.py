import orjson
import pytest

from fakevllm_adapters.protocol.errors import Json, WireError
from fakevllm_adapters.vllm_compat.chat_request import (
    ChatRequest,
    allowed_new_tokens,
    parse_chat_request,
    truncate_prompt,
)
from fakevllm_adapters.vllm_compat.grammar import Grammar

TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"$defs": {"X": {}}}}}
REQUEST: Json = {"messages": [{"role": "user", "content": "hi"}]}


def refused(body: object) -> Json:
    """Return the error of the 400 that this body gets."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(WireError) as refusal:
        parse_chat_request(raw)
    assert refusal.value.status == 400
    return refusal.value.body["error"]


def test_unusual_fields_are_accepted_as_vllm_accepts_them() -> None:
    loose = {
        "messages": [{"role": "bogus", "content": None}],
        "frobnicate": 1,
        "functions": [],
        "user": "me",
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "seed": None,
    }
    assert parse_chat_request(orjson.dumps(loose)).max_new_tokens == 6


REFUSALS: list[tuple[object, str]] = [
    (
        b"{",
        "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1', "
        "'msg': 'JSON decode error', 'input': '<dict of 0 items>', "
        "'ctx': {'error': 'Expecting property name enclosed in double quotes'}}",
    ),
    (
        {"model": "x"},
        "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', "
        "'msg': 'Field required', 'input': '<dict of 1 items>'}",
    ),
    (
        REQUEST | {"max_tokens": "x"},
        "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', "
        "'msg': 'Input should be a valid integer, unable to parse string as an integer', "
        "'input': 'x'}",
    ),
    (
        {"messages": []},
        "Cannot apply chat template to an empty conversation. Provide at least one message.",
    ),
    (
        REQUEST | {"temperature": -1},
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
    ),
    (REQUEST | {"top_p": 2.0}, "top_p must be in (0, 1], got 2.0. (parameter=top_p, value=2.0)"),
    (REQUEST | {"n": 0}, "n must be at least 1, got 0."),
    (
        REQUEST | {"n": 3, "temperature": 0},
        "n must be 1 when using greedy sampling, got 3.",
    ),
    (
        REQUEST | {"max_tokens": 0},
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    ),
    (
        REQUEST | {"stream_options": {"include_usage": True}},
        "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
    ),
    (
        REQUEST | {"tool_choice": "auto"},
        "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
    ),
    (
        REQUEST | {"logprobs": True, "top_logprobs": -1},
        "`top_logprobs` must be a positive value. (parameter=top_logprobs, value=-1)",
    ),
    (
        REQUEST | {"logprobs": True, "top_logprobs": 21},
        "Requested sample logprobs of 21, which is greater than max allowed: 20 "
        "(parameter=logprobs, value=21)",
    ),
    (
        REQUEST | {"logprobs": False, "top_logprobs": 2},
        "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
    ),
    (
        REQUEST | {"logit_bias": {"abc": 1, "5": 1}},
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['abc'] "
        "(parameter=logit_bias, value=['abc'])",
    ),
    (
        REQUEST | {"stop": ["a", "b", "c", "d", "e"]},
        "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should "
        "be a valid string', 'input': '<list of 5 items>'}\n  {'type': 'too_long', 'loc': "
        "'body.stop', 'msg': 'List should have at most 4 items after validation, not 5', 'input': "
        "'<list of 5 items>', 'ctx': {'field_type': 'List', 'max_length': '4', "
        "'actual_length': '5'}}",
    ),
    (
        REQUEST | {"tools": [TOOL], "tool_choice": "any"},
        'Invalid value for `tool_choice`: any! Only named tools, "none", "auto" or "required" '
        "are supported. (parameter=tool_choice)",
    ),
    (
        REQUEST | {"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}},
        "The tool specified in `tool_choice` does not match any of the specified `tools` "
        "(parameter=tool_choice)",
    ),
    (
        REQUEST | {"tools": [{"type": "function"}]},
        "1 validation error:\n  {'type': 'missing', 'loc': 'body.tools.0.function', 'msg': 'Field "
        "required', 'input': '<dict of 1 items>'}",
    ),
    (
        REQUEST | {"stream": True, "prompt_logprobs": 1},
        "`prompt_logprobs` are not available when `stream=True`. (parameter=prompt_logprobs)",
    ),
    (
        REQUEST | {"response_format": {"type": "json_schema"}},
        "When response_format type is 'json_schema', the 'json_schema' field must be provided. "
        "(parameter=response_format)",
    ),
    (
        REQUEST | {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "You can only use one kind of constraints for structured outputs "
        "('json', 'regex' or 'choice').",
    ),
    (
        REQUEST | {"structured_outputs": {"choice": []}},
        "Choice '[]' cannot be an empty list",
    ),
    (
        REQUEST | {"continue_final_message": True, "add_generation_prompt": True},
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
    ),
    (REQUEST | {"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
    (
        REQUEST | {"repetition_penalty": 0},
        "repetition_penalty must be greater than zero, got 0.0.",
    ),
    (REQUEST | {"stop": ""}, "stop cannot contain an empty string."),
    (REQUEST | {"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
]


@pytest.mark.parametrize(("raw", "message"), REFUSALS)
def test_refusals_have_vllms_messages(raw: object, message: str) -> None:
    assert refused(raw)["message"] == message


UNSUPPORTED: list[tuple[Json, str]] = [
    ({"use_beam_search": True}, "use_beam_search"),
    ({"echo": True}, "echo"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
]


@pytest.mark.parametrize(("fields", "name"), UNSUPPORTED)
def test_a_field_that_no_bundled_engine_supports_is_refused_by_name(
    fields: Json, name: str
) -> None:
    error = refused(REQUEST | fields)
    assert error["param"] == name and f"`{name}` is not supported" in error["message"]


def test_a_large_wrong_value_is_not_echoed_back() -> None:
    assert len(refused({"messages": "x" * 100_000})["message"]) < 1000


def test_a_prompt_that_fills_the_context_is_refused_and_a_long_answer_is_clipped() -> None:
    with pytest.raises(
        WireError, match=r"maximum context length is 256 tokens.*at least 257 input"
    ):
        allowed_new_tokens(257, None, 256)
    with pytest.raises(
        WireError, match=r"max_tokens=1000 cannot be greater than max_model_len=256"
    ):
        allowed_new_tokens(10, 1000, 256)
    assert allowed_new_tokens(200, 100, 256) == 56
    assert allowed_new_tokens(10, None, 256) == 246


def parsed(**fields: object) -> ChatRequest:
    return parse_chat_request(orjson.dumps(REQUEST | fields))


GRAMMARS: list[tuple[Json, Grammar | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json", '{"type": "object"}')),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "null"}},
            }
        },
        Grammar("json", '{"type": "null"}'),
    ),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
    (
        {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
        Grammar("json", "{}", any_whitespace=False),
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        Grammar("arguments", '{"$defs": {"X": {}}}', any_whitespace=False),
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), GRAMMARS)
def test_each_constraint_gives_its_grammar(fields: Json, grammar: Grammar) -> None:
    assert parsed(**fields).grammar == grammar


def test_a_required_tool_replaces_a_response_format() -> None:
    request = parsed(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert request.grammar is not None and request.grammar.kind == "calls"
    schema = orjson.loads(request.grammar.text)
    assert schema["minItems"] == 1 and schema["$defs"] == {"X": {}}
    assert schema["items"]["anyOf"][0]["properties"] == {
        "name": {"type": "string", "enum": ["add"]},
        "parameters": {},
    }


def test_tools_that_define_a_name_differently_are_refused() -> None:
    other = {"function": {"name": "b", "parameters": {"$defs": {"X": {"type": "null"}}}}}
    error = refused(REQUEST | {"tools": [TOOL, other], "tool_choice": "required"})
    assert error["message"] == ("Tool definition 'X' has multiple schemas, which is not supported.")


def test_a_prompt_is_truncated_at_the_requested_side() -> None:
    prompt = [1, 2, 3, 4]
    assert truncate_prompt(prompt, parsed(), 10) == prompt
    assert truncate_prompt(prompt, parsed(truncate_prompt_tokens=2), 10) == [3, 4]
    right = parsed(truncate_prompt_tokens=2, truncation_side="right")
    assert truncate_prompt(prompt, right, 10) == [1, 2]
    assert truncate_prompt(prompt, parsed(truncate_prompt_tokens=-1, max_tokens=7), 10) == [2, 3, 4]
    with pytest.raises(WireError, match="truncate_prompt_tokens=11 cannot be greater"):
        truncate_prompt(prompt, parsed(truncate_prompt_tokens=11), 10)
