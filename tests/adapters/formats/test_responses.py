import re

import orjson
import pytest

from fakevllm_adapters.formats.base import EngineInfo, Json
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
def test_a_whole_response_has_vllms_keys(engine: EngineInfo) -> None:
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


def test_fields_of_the_request_are_repeated_as_vllm_understands_them() -> None:
    request: Json = {
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
    repeated = orjson.loads(opened(**request).answer(completion({"content": "x"})))
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


def test_calls_keep_the_upstreams_ids_and_get_their_namespaces_back() -> None:
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


def test_each_response_has_a_new_id_unless_the_request_sets_it() -> None:
    assert re.fullmatch("resp_[0-9a-f]{16}", opened().response_id)
    assert opened().response_id != opened().response_id
    request = opened(request_id="mine")
    assert orjson.loads(request.answer(completion({"content": "x"})))["id"] == "mine"


def test_the_id_of_a_known_previous_response_is_repeated() -> None:
    body: Json = {"input": "b", "previous_response_id": "resp_1"}
    exchange = RESPONSES.open(body, NEW, [({"input": "a"}, {"content": "A"})])
    raw = exchange.answer(completion({"content": "x"}))
    assert orjson.loads(raw)["previous_response_id"] == "resp_1"


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"choices":[]}', b'{"choices":[{}]}'])
def test_a_malformed_chat_completion_raises_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        opened().answer(raw)


def test_a_call_cut_off_by_its_limit_is_incomplete_despite_its_finish_reason() -> None:
    request: Json = {"tools": TOOLS, "max_output_tokens": 8}
    message = {"content": None, "tool_calls": CALLS[:1]}
    raw = completion(message, "tool_calls")
    assert orjson.loads(opened(OLD, **request).answer(raw))["status"] == "incomplete"
    assert orjson.loads(opened(NEW, **request).answer(raw))["status"] == "completed"
