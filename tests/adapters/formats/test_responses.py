import re

import orjson
import pytest

from fakevllm_adapters.formats.base import Engine, Json
from tests.adapters.formats.responses_exchanges import (
    BOTH,
    GOLDEN,
    LOOK,
    NEW,
    NEW_KEYS,
    OLD,
    RESPONSES,
    TOOLS,
    completion,
    masked,
    opened,
)


@BOTH
def test_a_whole_answer_is_vllms_key_by_key(engine: Engine) -> None:
    raw = opened(engine).answer(completion({"role": "assistant", "content": "Hello there"}))
    assert masked(raw) == (GOLDEN if engine is NEW else NEW_KEYS.sub("", GOLDEN))


def test_reasoning_and_logprobs_are_written_as_vllm_does() -> None:
    token: Json = {"token": "H", "logprob": -0.00001, "bytes": [72]}
    logprobs = {"content": [token | {"top_logprobs": [token]}]}
    exchange = opened(include=["message.output_text.logprobs"], top_logprobs=1)
    message = {"role": "assistant", "reasoning": "hmm", "content": "H"}
    raw = exchange.answer(completion(message, logprobs=logprobs))
    assert (
        '"output":[{"id":"rs_ID","summary":[],"type":"reasoning","content":[{"text":"hmm",'
        '"type":"reasoning_text"}],"encrypted_content":null,"status":null},{"id":"msg_ID",'
        '"content":[{"annotations":[],"text":"H","type":"output_text","logprobs":[{"token":"H",'
        '"bytes":[72],"logprob":-1e-05,"top_logprobs":[{"token":"H","bytes":[72],'
        '"logprob":-1e-05}]}]}],"role":"assistant","status":"completed","type":"message",'
        '"phase":null}]' in masked(raw)
    )
    assert orjson.loads(raw)["top_logprobs"] == 1


def test_what_was_asked_is_repeated_as_vllm_understands_it() -> None:
    asked: Json = {
        "temperature": 0.001,
        "frequency_penalty": 1,
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "prompt_cache_retention": "in-memory",
        "tools": [LOOK],
        "tool_choice": {"type": "function", "name": "look"},
    }
    repeated = orjson.loads(opened(**asked).answer(completion({"content": "x"})))
    assert repeated["reasoning"] == {
        **{"context": None, "effort": "low", "generate_summary": None},
        **{"mode": None, "summary": None},
    }
    schema: Json = {"name": "n", "schema": {}, "type": "json_schema"}
    assert repeated["text"] == {
        "format": schema | {"description": None, "strict": None},
        "verbosity": None,
    }
    assert repeated["tool_choice"] == {"name": "look", "type": "function"}
    expected = {
        "temperature": 0.01,
        "frequency_penalty": 1.0,
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "prompt_cache_retention": "in_memory",
    }
    assert {name: repeated[name] for name in expected} == expected


def test_greedy_sampling_has_no_top_p() -> None:
    raw = opened(temperature=0, top_p=0.5).answer(completion({"content": "x"}))
    assert orjson.loads(raw)["top_p"] == 1.0


CALLS: list[Json] = [
    {"id": f"chatcmpl-tool-{name}", "function": {"name": name, "arguments": '{"a": 1}'}}
    for name in ("look", "eye__see")
]


def test_calls_keep_the_upstreams_ids_and_go_back_to_their_namespaces() -> None:
    raw = opened(tools=TOOLS).answer(
        completion({"content": None, "tool_calls": CALLS}, "tool_calls")
    )
    items = orjson.loads(raw)["output"]
    assert [(item["call_id"], item["name"], item["namespace"]) for item in items] == [
        ("chatcmpl-tool-look", "look", None),
        ("chatcmpl-tool-eye__see", "see", "eye"),
    ]
    assert list(items[0]) == [
        *("arguments", "call_id", "name", "type", "id", "async", "caller", "namespace", "status")
    ]


def test_two_exchanges_have_two_ids_and_an_asked_one_is_used() -> None:
    assert re.fullmatch("resp_[0-9a-f]{16}", opened().response_id)
    assert opened().response_id != opened().response_id
    asked = opened(request_id="mine")
    assert orjson.loads(asked.answer(completion({"content": "x"})))["id"] == "mine"


def test_a_resolved_previous_response_is_still_named() -> None:
    body: Json = {"input": "b", "previous_response_id": "resp_1"}
    exchange = RESPONSES.open(body, NEW, [({"input": "a"}, {"content": "A"})])
    raw = exchange.answer(completion({"content": "x"}))
    assert orjson.loads(raw)["previous_response_id"] == "resp_1"


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"choices":[]}', b'{"choices":[{}]}'])
def test_what_is_no_chat_completion_is_no_answer(raw: bytes) -> None:
    with pytest.raises(ValueError):
        opened().answer(raw)


def test_a_call_cut_by_its_limit_is_known_where_the_finish_reason_hides_it() -> None:
    asked: Json = {"tools": TOOLS, "max_output_tokens": 8}
    message = {"content": None, "tool_calls": CALLS[:1]}
    raw = completion(message, "tool_calls")
    assert orjson.loads(opened(OLD, **asked).answer(raw))["status"] == "incomplete"
    assert orjson.loads(opened(NEW, **asked).answer(raw))["status"] == "completed"
