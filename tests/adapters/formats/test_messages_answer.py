import json
from typing import Any

import orjson
import pytest

from fakevllm_adapters.formats.base import Answer
from fakevllm_adapters.protocol.errors import error_body, schema_error, unauthorized, unknown_model
from tests.adapters.formats.messages_bodies import MESSAGES, Json, opened, text


def completion(message: Json, finish_reason: str = "stop", **fields: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 10, "total_tokens": 18, "completion_tokens": 8}
    answer: Json = {"id": "chatcmpl-1", "model": "demo", "choices": [choice], "usage": usage}
    return orjson.dumps(answer | fields)


def answered(raw: bytes) -> str:
    return opened().answer(raw).decode()


def call(arguments: str, call_id: str = "t1") -> Json:
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_an_answer_has_vllms_keys_in_vllms_order() -> None:
    plain: Json = {"role": "assistant", "content": "Hello there", "reasoning": None}
    assert answered(completion(plain)) == (
        '{"id":"chatcmpl-1","type":"message","role":"assistant",'
        '"content":[{"type":"text","text":"Hello there"}],"model":"demo",'
        '"stop_reason":"end_turn","usage":{"input_tokens":10,"output_tokens":8}}'
    )


def test_reasoning_text_and_calls_are_blocks_in_this_order() -> None:
    message = {"content": "Hi", "reasoning": "hmm", "tool_calls": [call('{"left": 3}')]}
    answer = json.loads(answered(completion(message, "tool_calls")))
    thinking, *others = answer["content"]
    assert list(thinking) == ["type", "thinking", "signature"]
    assert (thinking["thinking"], len(thinking["signature"])) == ("hmm", 32)
    assert others == [
        text("Hi"),
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"left": 3}},
    ]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("finish", "expected"), [("length", "max_tokens"), ("abort", None)])
def test_a_finish_reason_has_its_stop_reason_or_none(finish: str, expected: str | None) -> None:
    assert json.loads(answered(completion({"content": "x"}, finish))).get("stop_reason") == expected


def test_an_empty_answer_has_one_empty_block() -> None:
    assert json.loads(answered(completion({"content": None})))["content"] == [text("")]


def test_cached_tokens_are_not_counted_as_input_tokens() -> None:
    details = {"cached_tokens": 4, "created_cache_tokens": 1, "multimodal_tokens": None}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": details}
    assert json.loads(answered(completion({"content": "x"}, usage=usage)))["usage"] == {
        "input_tokens": 5,
        "output_tokens": 2,
        "cache_creation_input_tokens": 1,
        "cache_read_input_tokens": 4,
    }


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"error": {"message": "x"}}',
        completion({"tool_calls": [call('{"left": ')]}),
        completion({"tool_calls": [call("[1]")]}),
        completion({"tool_calls": [call("[" * 5000)]}),
    ],
)
def test_a_malformed_answer_raises_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        opened().answer(raw)


def test_a_call_that_was_cut_off_can_be_shown_only_in_a_stream() -> None:
    whole, cut = (
        Answer({"tool_calls": [call(expected)]}, "stop") for expected in ("{}", '{"left": ')
    )
    assert opened().can_show(whole) and not opened().can_show(cut)
    assert opened(stream=True).can_show(cut)
    assert opened().can_show(Answer({"content": None}, "length"))


def test_an_error_of_the_engine_has_anthropics_form_and_type() -> None:
    error = unknown_model("zz", "demo")
    assert MESSAGES.refusal(error.status, error.body) == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "The model `zz` does not exist. Valid aliases: demo.",
        },
    }


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "invalid_request_error"),
        (422, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_each_status_has_an_error_type(status: int, expected: str) -> None:
    refusal = MESSAGES.refusal(status, error_body("no", "BadRequestError", status))
    assert refusal["error"]["type"] == expected


@pytest.mark.parametrize(
    "web_layers",
    [unauthorized().body, {"detail": "Not Found"}, schema_error([]).body],
)
def test_errors_of_vllms_web_layer_keep_their_form(web_layers: Json) -> None:
    assert MESSAGES.refusal(400, web_layers) == web_layers
