"""What is kept of a streamed answer, and what the app sees of it."""

from typing import Any

import pytest

from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, SseDecoder, encode, parse_event
from fakevllm_server.rollout.capture.chat import ChatCapture
from fakevllm_server.types.weight_gate import CallStamp

Json = dict[str, Any]


def chunk(delta: Json, ids: list[int] | None, finish: str | None = None) -> bytes:
    logprobs = {"content": [{"logprob": -0.5}] * len(ids)} if ids else None
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish,
        "token_ids": ids,
    }
    return encode({"choices": [choice]})


ROLE: Json = {
    "id": "1",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    "prompt_token_ids": [1, 2],
}
USAGE: Json = {
    "id": "1",
    "choices": [],
    "usage": {"completion_tokens": 3},
    "system_fingerprint": "vllm",
}


def streamed(body: Json, *events: bytes) -> tuple[list[Json], Any]:
    """The chunks the app sees, and the record."""
    capture = ChatCapture({"stream": True} | body, {})
    shown = SseDecoder().feed(b"".join(map(capture.event, events)))
    assert shown.pop() == DONE
    return [parse_event(event) or {} for event in shown], capture.record(CallStamp([9]))


def swallowing(usage: Json = USAGE) -> list[bytes]:
    """A stream with a token that the engine's parser swallowed."""
    last = chunk({}, [8], finish="stop")
    return [encode(ROLE), chunk({"content": "h"}, [7]), chunk({}, [9]), last, encode(usage), DONE]


def test_a_stream_gives_the_same_record_and_no_trace_of_our_asking() -> None:
    chunks, call = streamed({}, *swallowing())
    assert (call.prompt_ids, call.response_ids, call.logprobs) == ([1, 2], [7, 9, 8], [-0.5] * 3)
    assert call.untrainable is None
    said = [entry["choices"][0]["delta"] for entry in chunks]
    assert said == [{"role": "assistant", "content": ""}, {"content": "h"}, {}]
    assert chunks[0]["prompt_token_ids"] is None
    assert all(entry["choices"][0].get("token_ids") is None for entry in chunks)


def test_usage_we_asked_for_is_taken_out_and_its_fingerprint_goes_where_vllm_puts_it() -> None:
    chunks, _ = streamed({}, *swallowing())
    assert all("usage" not in entry for entry in chunks)
    assert list(chunks[-1]) == ["choices", "system_fingerprint"]
    assert [entry.get("system_fingerprint") for entry in chunks] == [None, None, "vllm"]


def test_usage_the_app_asked_for_stays_where_it_was() -> None:
    chunks, call = streamed({"stream_options": {"include_usage": True}}, *swallowing())
    assert chunks[-1] == USAGE and "system_fingerprint" not in chunks[-2]
    assert call.untrainable is None


def test_usage_an_engine_tells_in_every_chunk_is_the_apps_too() -> None:
    told = [encode(ROLE | {"usage": {"completion_tokens": 0}}), *swallowing()[1:]]
    chunks, call = streamed({}, *told)
    assert chunks[-1] == USAGE and call.untrainable is None


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"include_usage": True, "continuous_usage_stats": False}),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            {"include_usage": True, "continuous_usage_stats": False},
        ),
        (
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ({"stream_options": "odd"}, "odd"),
        ({"n": 2}, None),
        ({"stream": False}, None),
    ],
)
def test_usage_is_asked_for_where_the_app_does_not_and_nothing_more(
    options: Json, asked: object
) -> None:
    upstream = ChatCapture({"stream": True} | options, {}).upstream_body()
    assert upstream.get("stream_options") == asked


def test_ids_that_do_not_add_up_to_a_streams_usage_are_not_trained() -> None:
    _, call = streamed({}, *swallowing(USAGE | {"usage": {"completion_tokens": 4}}))
    assert call.untrainable == "missing_token_ids"


def test_a_stream_that_ends_with_an_error_is_no_call_and_its_last_chunk_is_not_lost() -> None:
    events = swallowing()
    events[4] = encode({"error": {"message": "odd"}})
    chunks, call = streamed({}, *events)
    assert call is None
    assert [next(iter(entry)) for entry in chunks] == ["id", "choices", "choices", "error"]


def test_a_comment_does_not_release_the_last_chunk() -> None:
    events = swallowing()
    chunks, call = streamed({}, *events[:4], KEEP_ALIVE, *events[4:])
    assert chunks[-1]["system_fingerprint"] == "vllm" and call.untrainable is None


@pytest.mark.parametrize("odd", [b"data: {\n\n", b'data: {"choices": [5]}\n\n'])
def test_an_event_that_cannot_be_read_is_passed_on_and_the_call_says_so(odd: bytes) -> None:
    capture = ChatCapture({"stream": True}, {})
    assert capture.event(odd) == odd
    for event in swallowing():
        capture.event(event)
    call = capture.record(CallStamp([9]))
    assert call is not None and call.untrainable == "unreadable_answer"


@pytest.mark.parametrize("asked", [{"return_token_ids": True}, {"logprobs": True}])
def test_an_app_that_asks_for_tokens_sees_the_swallowed_ones(asked: Json) -> None:
    chunks, _ = streamed(asked, *swallowing())
    assert [entry["choices"][0]["delta"] for entry in chunks][2] == {}


def test_hidden_reasoning_leaves_no_chunk_in_a_stream() -> None:
    events = [
        encode(ROLE),
        chunk({"reasoning": ""}, [6]),
        chunk({"reasoning": "hm"}, [7]),
        chunk({"reasoning": ".", "content": "Hi"}, [9]),
        chunk({"content": ""}, [8], finish="stop"),
        encode(USAGE | {"usage": {"completion_tokens": 4}}),
        DONE,
    ]
    chunks, call = streamed({"include_reasoning": False}, *events)
    deltas = [entry["choices"][0]["delta"] for entry in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hi", "reasoning": None},
        {},
    ]
    assert call.response_ids == [6, 7, 9, 8] and call.untrainable is None
