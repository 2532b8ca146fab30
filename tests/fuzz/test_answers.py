"""Garbled responses of an engine.

Each format returns a valid response or an error. A captured call can be trained, or has the reason
why it cannot.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_adapters.formats.base import EngineInfo, Exchange
from fakevllm_adapters.formats.chat import stream_end
from fakevllm_adapters.formats.registry import ADAPTERS, TOKEN_COUNTERS
from fakevllm_adapters.formats.sse import DONE, SseDecoder, data_of, encode, parse_event
from fakevllm_adapters.protocol.errors import internal_error
from fakevllm_server.rollout.capture.capture_registry import CAPTURES
from fakevllm_server.types.weight_versions import CallStamp
from tests.fuzz.bodies import CHAT_ANSWER, CHUNKS, ERROR, TEXT_ANSWER, TEXT_CHUNKS, USER, Json
from tests.fuzz.garble import ODD_VALUES, garbled

MANY = settings(max_examples=80)
REQUESTS: dict[str, Json] = {
    "chat": {"messages": [USER]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"model": "fake", "messages": [USER], "max_tokens": 5},
    "count_tokens": {"model": "fake", "messages": [USER]},
}
STREAMING = ["chat", "completions", "responses", "messages"]
COUNTED: Json = {"count": 2, "max_model_len": 9, "tokens": [1, 2], "token_strs": None}


def open_exchange(name: str, **more: Any) -> Exchange:
    return (ADAPTERS | TOKEN_COUNTERS)[name].open(
        REQUESTS[name] | more, EngineInfo("fake", 4096, "0")
    )


def garbled_streams(chunks: list[Json]) -> st.SearchStrategy[list[bytes]]:
    """Return a strategy for garbled streams: one event is garbled, noise is inserted, or the stream
    is cut off."""
    valid = [encode(chunk) for chunk in chunks]
    at = st.integers(0, len(chunks) - 1)
    framed = garbled(*chunks, ERROR).map(lambda raw: b"data: " + raw + b"\n\n")
    other = framed | st.binary(max_size=40).map(lambda raw: raw + b"\n\n")

    def stream(index: int, odd: bytes, ends: list[bytes]) -> list[bytes]:
        return [*valid[:index], odd, *valid[index + 1 :], *ends]

    return st.builds(stream, at, other, st.sampled_from([[DONE], [], [DONE, DONE, valid[0]]]))


def is_well_formed(stream: bytes, name: str) -> bool:
    """Return whether every event is complete and is an object, [DONE] or a comment.

    Formats that pass bytes on do not read the object.
    """
    decoder = SseDecoder()
    payloads = [data for event in decoder.feed(stream) if (data := data_of(event)) is not None]
    is_passed_on = name in ("chat", "completions")
    return not decoder.rest() and all(
        data.startswith(b"{") and (is_passed_on or isinstance(orjson.loads(data), dict))
        for data in payloads
    )


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("more", [{}, {"stream": False, "model": "fake"}])
def test_a_garbled_answer_is_translated_or_refused(name: str, more: Json) -> None:
    @MANY
    @given(garbled(CHAT_ANSWER, TEXT_ANSWER, COUNTED, ERROR))
    def each(raw: bytes) -> None:
        try:
            shown = open_exchange(name, **more).answer(raw)
        except ValueError:
            return
        assert isinstance(orjson.loads(shown), dict)

    each()


@pytest.mark.parametrize("name", STREAMING)
def test_a_garbled_stream_becomes_a_complete_stream_in_the_apps_format(name: str) -> None:
    chunks = TEXT_CHUNKS if name == "completions" else CHUNKS

    @MANY
    @given(garbled_streams(chunks))
    def each(events: list[bytes]) -> None:
        exchange = open_exchange(name, stream=True)
        shown = exchange.keep_alive() + b"".join(map(exchange.event, events))
        if DONE not in events:
            shown += stream_end(exchange, events)
        assert is_well_formed(shown, name), shown[-400:]
        assert shown.endswith(LAST_BYTES[name]) or b"error" in shown, shown[-400:]

    each()


LAST_BYTES = {
    "chat": DONE,
    "completions": DONE,
    "responses": b"}\n\n",
    "messages": b'{"type":"message_stop"}\n\n',
}


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("error", [internal_error().body, {}, {"error": "x"}, {"error": {"a": 1}}])
def test_a_stream_that_ends_with_any_error_has_an_end(name: str, error: Json) -> None:
    for events in ([], [encode(CHUNKS[0])], list(map(encode, CHUNKS))):
        exchange = open_exchange(name, stream=True)
        shown = b"".join(map(exchange.event, events)) + exchange.end_with_error(error)
        assert is_well_formed(shown, name) and shown


@pytest.mark.parametrize("path", CAPTURES)
def test_a_garbled_answer_is_captured_or_has_a_reason(path: str) -> None:
    @MANY
    @given(garbled(CHAT_ANSWER, TEXT_ANSWER), st.sampled_from([{}, {"include_reasoning": False}]))
    def each(raw: bytes, more: Json) -> None:
        capture = CAPTURES[path](more, {})
        capture.answer(raw)
        record = capture.record(CallStamp([3]))
        assert record is None or record.to_wire().model_dump_json()

    each()


@pytest.mark.parametrize("path", CAPTURES)
def test_a_garbled_stream_is_captured_or_has_a_reason(path: str) -> None:
    @MANY
    @given(garbled_streams(CHUNKS if "chat" in path else TEXT_CHUNKS))
    def each(events: list[bytes]) -> None:
        capture = CAPTURES[path]({"stream": True}, {})
        shown = b"".join(map(capture.event, events))
        assert shown.count(DONE) == events.count(DONE)
        record = capture.record(CallStamp([3]))
        assert record is None or record.to_wire().model_dump_json()

    each()


@pytest.mark.parametrize("path", CAPTURES)
def test_a_call_with_odd_fields_can_be_captured(path: str) -> None:
    fields: Json = {
        **{"temperature": 1, "stream": True, "stream_options": {"include_usage": True}, "n": 1},
        **{"logprobs": 1, "top_logprobs": 1, "tools": [{"function": {"strict": True}}]},
        **{"response_format": {"type": "text"}, "tool_choice": "auto", "prompt": [[1], [2]]},
    }

    @MANY
    @given(garbled(fields))
    def each(raw: bytes) -> None:
        try:
            body: Any = orjson.loads(raw)
        except ValueError:
            return
        request: Json = cast(Json, body) if isinstance(body, dict) else {}
        if request and not CAPTURES[path].cannot_capture(request):
            capture = CAPTURES[path](request, {})
            assert capture.upstream_body()["return_token_ids"] is True
            capture.answer(orjson.dumps(CHAT_ANSWER))
            record = capture.record(CallStamp([3]))
            assert record is None or b"null" not in orjson.dumps(record.temperature)

    each()


@MANY
@given(st.lists(st.sampled_from([b"data: 1", b"\n", b"\r", b"\r\n", b": c", b"\n\n", b"x"])))
def test_a_stream_is_split_into_events_independently_of_its_chunks(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    at_once, bytewise = SseDecoder(), SseDecoder()
    events = at_once.feed(whole)
    events_bytewise = [
        event for at in range(len(whole)) for event in bytewise.feed(whole[at : at + 1])
    ]
    assert b"".join(events_bytewise) + bytewise.rest() == b"".join(events) + at_once.rest() == whole
    assert list(filter(None, map(data_of, events_bytewise))) == list(
        filter(None, map(data_of, events))
    )


@pytest.mark.parametrize("odd", ODD_VALUES)
def test_the_data_of_an_event_is_an_object_or_nothing_or_invalid_json(odd: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(parse_event(b"data: " + odd + b"\n\n"), dict | None)
