import re
from sys import getrefcount
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.chat import ChatAdapter, RelayExchange, stream_end
from fakevllm_adapters.formats.sse import DONE, encode

CHAT = ChatAdapter()
Json = dict[str, Any]


def body(**fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def test_the_leads_request_is_the_apps_own_body() -> None:
    request = body(temperature=0.3, frobnicate=1)
    assert CHAT.sibling_body(request, 0, 1.0) is request


def test_siblings_sample_from_the_whole_distribution_and_keep_unknown_fields() -> None:
    changed = CHAT.sibling_body(body(temperature=0.3, top_p=0.5, seed=7, frobnicate=1), 2, 1.0)
    assert (changed["temperature"], changed["top_p"], changed["seed"]) == (1.0, 1.0, 9)
    assert changed["frobnicate"] == 1


@given(
    st.lists(
        st.sampled_from(
            [
                *(b'"finish_reason":null', b'"finish_reason": null', b'"finish_reason":"stop"'),
                *(b'"finish_reason": "length"', b'"error":{}', b'"error":null', b'"error": "x"'),
                *(b'"text":"\\"finish_reason\\":\\"stop\\""', b'"finish_reason"', b'"id":1'),
            ]
        ),
        max_size=4,
    )
)
def test_a_stream_is_whole_if_a_finish_reason_or_an_error_is_set(parts: list[bytes]) -> None:
    event = b"data: {" + b",".join(parts) + b"}\n\n"
    is_whole = re.search(rb'"finish_reason":\s*"|"error":\s*[{"]', event) is not None
    assert (stream_end(RelayExchange({}), [event]) == DONE) <= is_whole
    exchange = RelayExchange({})
    exchange.event(b'data: {"choices":[{}]}\n\n')
    exchange.event(event)
    assert (exchange.event(DONE) == DONE) == is_whole


def test_an_unseeded_request_stays_unseeded() -> None:
    assert "seed" not in CHAT.sibling_body(body(), 1, 1.0)


@pytest.mark.parametrize(
    ("value", "seed"),
    [(7, 7), (7.0, 7), ("7", 7), (0, 0), (None, None), (-1, None), (7.5, None), (2**70, None)],
)
def test_the_seed_is_read_as_vllm_reads_it(value: object, seed: int | None) -> None:
    assert CHAT.seed(body(seed=value)) == seed
    assert CHAT.seed(body()) is None


def test_the_question_is_the_last_user_message_and_the_opening_the_first() -> None:
    request: Json = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "first"}]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "last"},
        ]
    }
    assert (CHAT.opening(request), CHAT.question(request)) == ("first", "last")


BROKEN: list[Json] = [{}, {"messages": 3}, {"messages": [7]}, {"messages": [{}]}]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_body_has_no_question(broken: Json) -> None:
    assert CHAT.question(broken) == ""


def chunk(delta: Json, finish: str | None = None) -> bytes:
    return encode({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def test_a_stream_is_parsed_into_its_whole_message() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look"}}
    arguments = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    answer = CHAT.parse_stream(
        [
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "He"}),
            chunk({"content": "llo"}),
            chunk({"tool_calls": [call]}),
            chunk({"tool_calls": [arguments]}),
            chunk({}, "tool_calls"),
            encode({"choices": [], "usage": {"completion_tokens": 5}}),
            DONE,
        ]
    )
    assert (answer.text, answer.finish_reason) == ("Hello", "tool_calls")
    assert answer.message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert answer.usage == {"completion_tokens": 5}


def test_a_role_that_every_event_repeats_is_in_the_message_once() -> None:
    events = [chunk({"role": "assistant", "content": letter}) for letter in "Hi"]
    answer = CHAT.parse_stream([*events, chunk({}, "stop"), DONE])
    assert answer.message == {"role": "assistant", "content": "Hi"}


def test_a_stream_that_breaks_off_or_is_empty_is_not_an_answer() -> None:
    for events in ([chunk({"content": "He"})], [encode({"choices": []}), DONE], [DONE]):
        with pytest.raises(ValueError, match="without a finish_reason"):
            CHAT.parse_stream(events)


def test_a_stream_with_done_but_without_a_finish_reason_has_the_reason_stop() -> None:
    answer = CHAT.parse_stream([chunk({"content": "He"}), DONE])
    assert (answer.text, answer.finish_reason) == ("He", "stop")


def test_the_events_of_a_long_stream_are_not_stored() -> None:
    events = [encode({"choices": [{"delta": {"content": f"{n}"}}]}) for n in range(3)]
    before = getrefcount(events[0])
    exchange = RelayExchange(body(stream=True))
    relayed = b"".join(map(exchange.event, events))
    assert relayed == b"".join(events)
    after = getrefcount(events[0])
    assert after == before
    assert b'"finish_reason":"stop"' in exchange.event(DONE)


def test_a_stream_with_an_error_is_not_an_answer() -> None:
    with pytest.raises(ValueError, match="ended in an error"):
        CHAT.parse_stream([chunk({"content": "He"}), encode({"error": {"message": "boom"}}), DONE])


@given(st.lists(st.text(), max_size=8))
def test_a_text_is_parsed_alike_however_it_is_split_into_deltas(pieces: list[str]) -> None:
    events = [*(chunk({"content": piece}) for piece in pieces), chunk({}, "stop")]
    assert CHAT.parse_stream(events).text == "".join(pieces)
