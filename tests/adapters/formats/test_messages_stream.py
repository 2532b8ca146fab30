"""Streamed messages: vLLM's events in order, for any stream of the upstream."""

import itertools
import json
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode
from fakevllm_adapters.protocol.errors import error_body, unavailable
from tests.adapters.formats.messages_bodies import FEW, Json
from tests.adapters.formats.messages_streams import (
    FIRST,
    LAST,
    USAGE,
    call,
    calls,
    chunk,
    events_in,
    fed,
    kinds,
    opened,
    whole,
)


def test_a_streamed_text_equals_vllms_stream() -> None:
    assert whole(chunk({"content": "H"}), chunk({"content": "i"})) == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-1",'
        '"type":"message","role":"assistant","content":[],"model":"demo","stop_reason":null,'
        '"stop_sequence":null,"usage":{"input_tokens":10,"output_tokens":0}}}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start",'
        '"content_block":{"type":"text","text":""},"index":0}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta",'
        '"delta":{"type":"text_delta","text":"H"},"index":0}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta",'
        '"delta":{"type":"text_delta","text":"i"},"index":0}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
        '"stop_sequence":null},"usage":{"input_tokens":10,"output_tokens":8}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_an_older_vllm_sends_no_stop_sequence() -> None:
    assert '"delta":{"stop_reason":"end_turn"},' in whole(version="0.27.1")
    assert '"stop_sequence":null},"usage"' in whole(version="0.33.0")


def test_a_thinking_block_ends_with_a_signature_before_the_text_begins() -> None:
    stream = whole(chunk({"reasoning": "hm"}), chunk({"reasoning": "m"}), chunk({"content": "Hi"}))
    assert kinds(stream) == [
        "start thinking 0",
        "thinking_delta 0",
        "thinking_delta 0",
        "signature_delta 0",
        "stop 0",
        "start text 1",
        "text_delta 1",
        "stop 1",
    ]
    assert re.search(r'"signature":"[0-9a-f]{32}"', stream)


def test_each_call_is_a_block_of_its_own() -> None:
    stream = whole(
        calls(call(0, "t1", name="add")),
        calls(call(0, arguments='{"left"'), call(0, arguments=": 3}")),
        calls(call(1, "t2", name="now", arguments="{}")),
        finish="tool_calls",
    )
    assert kinds(stream) == [
        "start tool_use 0",
        "input_json_delta 0",
        "input_json_delta 0",
        "stop 0",
        "start tool_use 1",
        "input_json_delta 1",
        "stop 1",
    ]
    assert '"content_block":{"type":"tool_use","id":"t1","name":"add","input":{}}' in stream
    assert '"delta":{"type":"input_json_delta","partial_json":": 3}"},"index":0' in stream
    assert '"stop_reason":"tool_use"' in stream


def test_text_within_a_call_follows_after_the_call() -> None:
    stream = whole(
        calls(call(0, "t1", name="add")),
        chunk({"content": "so"}),
        chunk({"content": " long"}),
        calls(call(0, arguments="{}")),
    )
    assert kinds(stream)[2:] == ["stop 0", "start text 1", "text_delta 1", "stop 1"]
    assert '"text":"so long"' in stream


def test_an_empty_answer_has_no_blocks() -> None:
    assert [event["type"] for event in events_in(whole())] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


def test_a_stream_without_a_usage_chunk_has_a_stop_reason() -> None:
    stream = events_in(fed(FIRST, chunk({"content": "x"}), chunk({}, "length"), DONE))
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    assert stream[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_stream_without_a_finish_reason_ends_with_end_turn() -> None:
    delta, stop = events_in(fed(FIRST, chunk({"content": "x"}), DONE))[-2:]
    assert (delta["delta"]["stop_reason"], stop["type"]) == ("end_turn", "message_stop")


def test_a_stream_without_a_choice_ends_in_an_error() -> None:
    counted = encode({"id": "c", "choices": [], "usage": {"completion_tokens": 1}})
    assert events_in(fed(counted, DONE))[-1]["type"] == "error"
    assert [event["type"] for event in events_in(fed(DONE))] == ["error"]


ERROR = error_body("Internal server error", "InternalServerError", 500)


def test_an_error_of_the_upstream_is_the_last_event() -> None:
    assert fed(encode(ERROR), DONE) == (
        'event: error\ndata: {"type":"error",'
        '"error":{"type":"api_error","message":"Internal server error"}}\n\n'
    )
    broken = events_in(fed(FIRST, chunk({"content": "x"}), encode(ERROR), LAST, DONE))
    assert [event["type"] for event in broken[-2:]] == ["content_block_delta", "error"]


def test_an_older_vllm_calls_every_error_of_a_stream_internal() -> None:
    assert '"type":"internal_error"' in fed(encode(ERROR), version="0.27.1")


def test_a_stream_that_broke_has_one_error_and_no_later_event() -> None:
    exchange = opened()
    exchange.event(FIRST)
    (event,) = events_in(exchange.end_with_error(unavailable("The engine is gone.").body).decode())
    assert event["error"] == {"type": "overloaded_error", "message": "The engine is gone."}
    rest = [exchange.end_with_error(ERROR), exchange.event(LAST), exchange.event(DONE)]
    assert rest == [b"", b"", b""]


@pytest.mark.parametrize("odd", [b"data: {\n\n", b"data: \xff\n\n"])
def test_malformed_json_ends_the_stream_with_an_error(odd: bytes) -> None:
    assert [event["type"] for event in events_in(fed(FIRST, odd))] == ["message_start", "error"]


def test_a_comment_and_a_keep_alive_are_pings() -> None:
    ping = 'event: ping\ndata: {"type":"ping"}\n\n'
    assert fed(KEEP_ALIVE) == ping
    assert opened().keep_alive().decode() == ping
    assert fed(b"\n\n") == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)
CHUNK_KEYS = ["choices", "usage", "id", "error"]
ODD_DELTA = st.dictionaries(st.sampled_from(["content", "reasoning", "tool_calls"]), JSON)
ODD_CHOICE = st.dictionaries(st.sampled_from(["delta", "finish_reason"]), ODD_DELTA | JSON)
ODD_CHUNK = st.dictionaries(st.sampled_from(CHUNK_KEYS), st.lists(ODD_CHOICE, max_size=2) | JSON)


@FEW
@given(st.lists(ODD_CHUNK.map(encode) | st.binary(max_size=20), max_size=5))
def test_odd_chunks_never_break_the_order_of_events(events: list[bytes]) -> None:
    for event in events_in(fed(*events, DONE)):
        assert event["type"] in (
            "message_start",
            "message_delta",
            "message_stop",
            "ping",
            "error",
        ) or event["type"].startswith("content_block_")


WORDS = st.text(max_size=10)
CALLS = st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), max_size=3)


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4).map(sorted))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@FEW
@given(WORDS, WORDS, CALLS, st.data())
def test_a_stream_accumulates_to_the_answer_however_it_is_split(
    reasoning: str, text: str, inputs: list[Json], data: st.DataObject
) -> None:
    uses = [json.dumps(arguments) for arguments in inputs]
    stream = whole(*chunks(reasoning, text, uses, data))
    assert accumulated(events_in(stream)) == answered(reasoning, text, uses)


def chunks(reasoning: str, text: str, uses: list[str], data: st.DataObject) -> list[bytes]:
    """Return chunks in an engine's order: reasoning, text, calls."""
    events = [chunk({"reasoning": piece}) for piece in pieces_of(reasoning, data)]
    events += [chunk({"content": piece}) for piece in pieces_of(text, data)]
    for index, arguments in enumerate(uses):
        events.append(calls(call(index, f"t{index}", name="add")))
        events += [calls(call(index, arguments=piece)) for piece in pieces_of(arguments, data)]
    return events


def answered(reasoning: str, text: str, uses: list[str]) -> Json:
    """Return the same completion as a whole answer, without the signature."""
    message = {
        "reasoning": reasoning,
        "content": text,
        "tool_calls": [
            call(0, f"t{index}", name="add", arguments=arguments)
            for index, arguments in enumerate(uses)
        ],
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    raw = {"id": "chatcmpl-1", "model": "demo", "choices": [choice], "usage": USAGE}
    answer = json.loads(opened().answer(orjson.dumps(raw)))
    for block in answer["content"]:
        block.pop("signature", None)
    if answer["content"] == [{"type": "text", "text": ""}]:
        answer["content"] = []  # a stream of nothing has no block
    return answer


def accumulated(events: list[Json]) -> Json:
    """Accumulate events as a client does, and check that at most one block is open."""
    message: Json = {}
    arguments = ""
    for event in events:
        kind, delta = event["type"], event.get("delta", {})
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments = ""
        elif kind == "content_block_delta":
            block = message["content"][event["index"]]
            arguments += delta.get("partial_json", "")
            for key in ("text", "thinking"):
                if key in delta:
                    block[key] += delta[key]
        elif kind == "content_block_stop":
            if message["content"][event["index"]]["type"] == "tool_use":
                message["content"][event["index"]]["input"] = json.loads(arguments)
        elif kind == "message_delta":
            message |= delta | {"usage": event["usage"]}
    assert events[-1]["type"] == "message_stop"
    message.pop("stop_sequence")
    return message
