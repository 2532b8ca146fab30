import json
from collections.abc import Sequence
from typing import Any, cast

import orjson
import pytest
from openai import omit
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fakevllm_adapters.formats.base import EngineInfo, Json
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode
from fakevllm_adapters.protocol.errors import error_body, internal_error
from tests.adapters.formats.responses_exchanges import (
    BOTH,
    GOLDEN,
    MIXED,
    NEW,
    NEW_KEYS,
    OLD,
    ROLE,
    TOOLS,
    call_delta,
    chat_stream,
    chunk,
    completion,
    events_of,
    kinds,
    masked,
    opened,
    streamed,
)

NEW_STREAM = [
    '{"item":{"id":"msg_ID","content":[],"role":"assistant","status":"in_progress","type":"message",'
    '"phase":null},"output_index":0,"sequence_number":2,"type":"response.output_item.added"}',
    '{"content_index":0,"item_id":"msg_ID","output_index":0,"part":{"annotations":[],"text":"",'
    '"type":"output_text","logprobs":[]},"sequence_number":3,'
    '"type":"response.content_part.added"}',
    '{"content_index":0,"delta":"Hello","item_id":"msg_ID","logprobs":[],"output_index":0,'
    '"sequence_number":4,"type":"response.output_text.delta"}',
    '{"content_index":0,"delta":" there","item_id":"msg_ID","logprobs":[],"output_index":0,'
    '"sequence_number":5,"type":"response.output_text.delta"}',
    '{"content_index":0,"item_id":"msg_ID","logprobs":[],"output_index":0,"sequence_number":6,'
    '"text":"Hello there","type":"response.output_text.done"}',
    '{"content_index":0,"item_id":"msg_ID","output_index":0,"part":{"annotations":[],'
    '"text":"Hello there","type":"output_text","logprobs":null},"sequence_number":7,'
    '"type":"response.content_part.done"}',
    '{"item":{"id":"msg_ID","content":[{"annotations":[],"text":"Hello there",'
    '"type":"output_text","logprobs":null}],"role":"assistant","status":"completed",'
    '"type":"message","phase":null},"output_index":0,"sequence_number":8,'
    '"type":"response.output_item.done"}',
]
"""Events between the resources. 0.27.1 writes ids without prefixes, and one more key at the end."""


@BOTH
def test_a_stream_has_vllms_events(engine: EngineInfo) -> None:
    exchange = opened(engine, stream=True)
    chat = chat_stream([{"content": "Hello"}, {"content": " there"}])
    lines = masked(b"".join(map(exchange.event, chat))).split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    between, golden = "\n".join(NEW_STREAM), GOLDEN
    if engine is OLD:
        between = between.replace("msg_ID", "ID").replace(
            '"phase":null},"output_index":0,"sequence_number":8',
            '"phase":null,"summary":[]},"output_index":0,"sequence_number":8',
        )
        golden = NEW_KEYS.sub("", GOLDEN)
    assert "\n".join(data[2:-1]) == between
    assert data[-1] == f'{{"response":{golden},"sequence_number":9,"type":"response.completed"}}'
    running = json.loads(golden) | {"output": [], "status": "in_progress", "usage": None}
    for number, kind in enumerate(("created", "in_progress")):
        first = {"response": running, "sequence_number": number, "type": f"response.{kind}"}
        assert data[number] == json.dumps(first, separators=(",", ":"))


@BOTH
def test_reasoning_text_and_calls_are_items_of_their_own(engine: EngineInfo) -> None:
    exchange = opened(engine, stream=True, tools=TOOLS)
    events = streamed(exchange, chat_stream(MIXED, "tool_calls"))
    part = "content_part" if engine is NEW else "reasoning_part"
    call = ["output_item.added", "function_call_arguments.delta"]
    done = ["function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", f"{part}.added"),
        *("reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", f"{part}.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(*call, "function_call_arguments.delta", *done),
        *(*call, *done, "completed"),
    ]
    finished = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert [item["type"] for item in finished] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert finished[0]["content"][0]["text"] == "hmm"
    assert finished[1]["content"][0]["text"] == "I look"
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in finished[2:]]
    assert calls == [
        ("chatcmpl-tool-look", "look", '{"a": 1}'),
        ("chatcmpl-tool-eye__see", "see", "{}"),
    ]
    assert [event.get("output_index") for event in events if "item" in event] == [
        *(0, 0, 1, 1, 2, 2, 3, 3)
    ]


@BOTH
def test_a_call_without_arguments_is_closed_as_vllm_closes_it(engine: EngineInfo) -> None:
    exchange = opened(engine, stream=True, tools=TOOLS)
    events = streamed(exchange, chat_stream([call_delta(0, "look", "")], "tool_calls"))
    assert ("function_call_arguments.done" in kinds(events)) == (engine is NEW)


@BOTH
def test_an_answer_cut_off_by_its_limit_is_incomplete(engine: EngineInfo) -> None:
    exchange = opened(engine, stream=True)
    *_, item, last = streamed(exchange, chat_stream([{"content": "Hel"}], "length"))
    resource = last["response"]
    assert resource["status"] == "incomplete"
    assert resource["incomplete_details"] == {"reason": "max_output_tokens"}
    expected = ("response.incomplete", "incomplete") if engine is NEW else ()
    assert (last["type"], item["item"]["status"]) == (
        expected or ("response.completed", "completed")
    )


def test_streamed_logprobs_are_sent_with_their_text() -> None:
    token: Json = {"token": "H", "logprob": -0.5, "bytes": [72]}
    logprobs = {"content": [token | {"top_logprobs": [token]}]}
    request: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": True}
    chat = [ROLE, chunk({"content": "H"}, logprobs=logprobs), chunk({}, "stop"), DONE]
    events = streamed(opened(**request), chat)
    delta = next(event for event in events if event["type"].endswith("text.delta"))
    short = {"token": "H", "logprob": -0.5}
    assert delta["logprobs"] == [short | {"top_logprobs": [short]}]
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert [each["bytes"] for each in part["logprobs"]] == [[72]]


def test_in_the_old_dialect_the_final_resource_has_the_logprobs_of_all_tokens() -> None:
    request: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 0, "stream": True}
    deltas: list[Json] = [{}, {"reasoning": "hm"}, {}, {"content": "H"}, {"content": "i"}]
    tokens = ["<think>", "hm", "</think>", "H", "i", "<end>"]
    logprobs = [{"content": [{"token": token, "logprob": -0.5}]} for token in tokens]
    chat = [chunk(delta, logprobs=logprobs[at]) for at, delta in enumerate(deltas)]
    chat = [ROLE, *chat, chunk({}, "stop", logprobs=logprobs[-1]), DONE]
    for engine, expected in ((OLD, tokens), (NEW, ["H", "i"])):
        thought, message = streamed(opened(engine, **request), chat)[-1]["response"]["output"]
        assert thought["content"] == [{"text": "hm", "type": "reasoning_text"}]
        assert [each["token"] for each in message["content"][0]["logprobs"]] == expected


def test_the_token_limit_accounts_for_the_prompt_from_the_first_chunk_on() -> None:
    created, *_ = streamed(opened(stream=True), [ROLE])
    assert created["response"]["max_output_tokens"] == 245
    created, *_ = streamed(opened(stream=True, max_output_tokens=999), [ROLE])
    assert created["response"]["max_output_tokens"] == 245


def test_keep_alives_are_events_and_the_first_events_are_sent_once() -> None:
    exchange = opened(stream=True)
    raw = exchange.keep_alive() + exchange.keep_alive()
    raw += b"".join(map(exchange.event, [KEEP_ALIVE, ROLE, chunk({"content": "H"})]))
    raw += exchange.keep_alive()
    raw += b"".join(map(exchange.event, chat_stream([])[1:]))
    assert exchange.keep_alive() == b""
    assert kinds(events_of(raw)) == [
        *("created", "in_progress", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "in_progress", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]


def test_the_keep_alive_of_a_whole_response_is_white_space() -> None:
    exchange = opened()
    raw = exchange.keep_alive() + exchange.answer(completion({"content": "x"}))
    assert raw.startswith(b" {") and orjson.loads(raw)["status"] == "completed"


ENDS: list[tuple[list[bytes], str]] = [
    ([encode(internal_error().body), DONE], "server_error"),
    ([encode(error_body("too many logprobs", "BadRequestError", 400)), DONE], "invalid_prompt"),
    ([encode(error_body("slow down", "x", 429)), DONE], "rate_limit_exceeded"),
    ([encode({"error": "boom"})], "server_error"),
    ([b"data: {\n\n"], "server_error"),
    ([encode({"choices": 3})], "server_error"),
    ([encode({"choices": [{"delta": {"content": 3}}]})], "server_error"),
]


@pytest.mark.parametrize(("ends", "code"), ENDS)
@pytest.mark.parametrize("begins", [[], [ROLE, chunk({"content": "Hel"})]], ids=["first", "later"])
def test_a_broken_stream_fails_once_and_has_the_reason(
    begins: list[bytes], ends: list[bytes], code: str
) -> None:
    events = streamed(opened(stream=True), begins + ends)
    assert kinds(events)[:2] == ["created", "in_progress"]
    assert kinds(events).count("failed") == 1 and kinds(events)[-1] == "failed"
    resource = events[-1]["response"]
    assert (resource["status"], resource["error"]["code"]) == ("failed", code)
    assert isinstance(resource["error"]["message"], str)


def test_a_stream_without_a_finish_reason_is_complete_if_it_had_a_choice() -> None:
    events = [ROLE, chunk({"content": "Hel"}), DONE]
    assert kinds(streamed(opened(stream=True), events))[-1] == "completed"
    for unsaid in ([DONE], [encode({"choices": []}), DONE]):
        assert kinds(streamed(opened(stream=True), unsaid))[-1] == "failed"


def test_no_event_follows_the_end() -> None:
    exchange = opened(stream=True)
    streamed(exchange, chat_stream([{"content": "x"}]))
    assert exchange.event(ROLE) == exchange.event(DONE) == b""
    assert exchange.end_with_error(internal_error().body) == b""


def test_a_stream_without_usage_ends_at_done() -> None:
    events = streamed(opened(stream=True), [ROLE, chunk({"content": "x"}, "stop"), DONE])
    assert kinds(events)[-1] == "completed"


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def accumulated(events: Sequence[Json]) -> Response:
    """Accumulate events with the openai SDK's helper."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    typed = [cast(Any, construct_type(type_=ResponseStreamEvent, value=event)) for event in events]
    return cast(Any, [each for event in typed for each in state.handle_event(event)][-1]).response


@BOTH
def test_the_openai_sdk_accumulates_a_stream(engine: EngineInfo) -> None:
    exchange = opened(engine, stream=True, tools=TOOLS)
    events = streamed(exchange, chat_stream(MIXED, "tool_calls"))
    if engine is NEW:  # the SDK is stricter than vLLM's old dialect, but does not insist
        for event in events:
            EVENT.validate_python(event)
    response = accumulated(events)
    assert response.output_text == "I look"
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.arguments) for call in calls] == [
        ("chatcmpl-tool-look", '{"a": 1}'),
        ("chatcmpl-tool-eye__see", "{}"),
    ]
    assert response.usage is not None and response.usage.total_tokens == 19


def test_the_openai_sdk_parses_a_failure_and_a_whole_response() -> None:
    failed = accumulated(streamed(opened(stream=True), [ROLE, encode(internal_error().body)]))
    assert failed.error is not None and failed.error.message == "Internal server error"
    raw = opened().answer(completion({"content": "Hello there"}))
    assert Response.model_validate_json(raw).output_text == "Hello there"
