"""The reader of usual stream events: it records and shows what a parser of the events would."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.vllm_compat.chat_response import ChatWriter
from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.rollout.capture.token_event import TokenEventReader
from fakevllm_server.types.calls import MAX_ID
from fakevllm_server.types.weight_versions import CallStamp

Json = dict[str, Any]

WRITER = ChatWriter("chatcmpl-1", 1795245319, "a model", "vllm-0.27")
TEXTS = st.text(max_size=12)
LOGPROBS = st.one_of(
    st.floats(max_value=0.0, allow_nan=False), st.sampled_from([0, -9999.0, -1e-05, None])
)


class ParsingCapture(ChatCapture):
    """A capture that parses each event."""

    def __init__(self, body: Json) -> None:
        super().__init__(body, {})
        self._token_events = None


@st.composite
def chunks(draw: st.DrawFn) -> Json:
    """A chunk of a stream: mostly the usual ones, and those that differ in one part."""
    text = draw(TEXTS)
    num = draw(st.sampled_from([1, 1, 1, 0, 2]))
    content = [
        {"token": draw(TEXTS), "logprob": draw(LOGPROBS), "bytes": [1], "top_logprobs": []}
        for _ in range(num)
    ]
    ids = draw(st.lists(st.integers(0, MAX_ID + 1), min_size=num, max_size=num))
    field = draw(st.sampled_from(["content", "content", "reasoning", "tool_calls"]))
    logprobs = draw(st.sampled_from([{"content": content}, {"content": content}, None]))
    chunk = WRITER.delta_chunk(draw(st.sampled_from([0, 0, 0, 1])), {field: text}, logprobs, ids)
    chunk |= draw(st.sampled_from([{}, {}, {"usage": None}, {"usage": {"completion_tokens": 1}}]))
    choice = chunk["choices"][0]
    choice |= draw(st.sampled_from([{}, {}, {"stop_reason": None}, {"allowed_tokens": None}]))
    choice["finish_reason"] = draw(st.sampled_from([None, None, None, "stop"]))
    return chunk


@st.composite
def events(draw: st.DrawFn) -> bytes:
    chunk = draw(chunks())
    event = encode(chunk)
    changes = {
        b"": b"",
        b'"content":': b'"content": ',
        b'"finish_reason"': b'"error":null,"finish_reason"',
        b'"choices"': b'"error":null,"choices"',
        b'"model"': b'"\\u006dodel"',
        b"a model": b"a \\u00e9",
        b'"top_logprobs":[]': b'"top_logprobs":null',
        b"chatcmpl": b"\xff",
        b'"logprob":-': b'"logprob":-1e999',
    }
    old = draw(st.sampled_from([*[b""] * 6, *changes]))
    return event.replace(old, changes[old]) if old else event


@given(st.lists(events(), max_size=12))
def test_a_stream_is_recorded_and_shown_as_if_each_event_were_parsed(stream: list[bytes]) -> None:
    body: Json = {"messages": [], "stream": True}
    usual, parsing = ChatCapture(body, {}), ParsingCapture(body)
    for event in [encode(WRITER.role_chunk(0, [1])), *stream, DONE]:
        assert usual.event(event) == parsing.event(event)
    stamp = CallStamp([1])
    one, other = usual.record(stamp), parsing.record(stamp)
    assert one == other
    if one is not None and other is not None:
        assert repr(one) == repr(other)


def new_capture(body: Json) -> ChatCapture:
    return ChatCapture(body, {})


def token_event(text: str = "a", token_id: int = 5, **fields: Any) -> bytes:
    logprob: Json = {"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}
    chunk = WRITER.delta_chunk(0, {"content": text}, {"content": [logprob]}, [token_id])
    return encode(chunk | fields)


@pytest.mark.parametrize("text", ["a", "", "é", '"', "\\", "\n", "],"])
def test_the_usual_event_is_read_without_parsing(text: str) -> None:
    reader = TokenEventReader()
    shown = reader.read(token_event(text))
    assert shown is not None
    chunk = orjson.loads(shown.removeprefix(b"data: "))
    assert chunk["choices"][0]["logprobs"] is chunk["choices"][0]["token_ids"] is None
    assert chunk["choices"][0]["delta"] == {"content": text}
    assert reader.take_tokens() == ([5], [-0.5])


def test_events_may_change_their_constant_parts_within_a_stream() -> None:
    reader = TokenEventReader()
    changes: list[Json] = [{}, {"usage": None}, {"id": "other"}, {}]
    for number, fields in enumerate(changes):
        shown = reader.read(token_event(token_id=number, **fields))
        assert shown is not None and b'"token_ids":null' in shown
    assert reader.take_tokens()[0] == [0, 1, 2, 3]


def test_an_event_that_is_not_utf8_is_not_recorded() -> None:
    reader = TokenEventReader()
    with pytest.raises(ValueError, match="utf-8"):
        reader.read(token_event("xx").replace(b"xx", b"\xff\xff"))
    assert reader.take_tokens() == ([], [])


@pytest.mark.parametrize("number", ["-1e999", "-1E+400", "-1.5e-320", "1e100"])
def test_a_number_that_may_exceed_a_float_is_not_read_without_parsing(number: str) -> None:
    event = token_event().replace(b'"logprob":-0.5', b'"logprob":%b' % number.encode())
    assert TokenEventReader().read(event) is None


def test_a_logprob_that_no_float_can_hold_does_not_lose_the_answer() -> None:
    usual, parsing = new_capture({"messages": []}), ParsingCapture({"messages": []})
    event = token_event().replace(b'"logprob":-0.5', b'"logprob":-1e999')
    for capture in (usual, parsing):
        assert capture.event(event) == event and capture.event(DONE) == DONE
    one, other = usual.record(CallStamp([1])), parsing.record(CallStamp([1]))
    assert one is not None and one == other and one.untrainable == "unreadable_answer"
