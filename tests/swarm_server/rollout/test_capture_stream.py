"""Capture of a streamed chat answer: the record, and the chunks that the app sees."""

from typing import Any

import pytest

from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, SseDecoder, encode, parse_event
from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.types.weight_versions import CallStamp

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
    """Capture a stream; return the chunks that the app sees, and the record."""
    capture = ChatCapture({"stream": True} | body, {})
    shown = SseDecoder().feed(b"".join(map(capture.event, events)))
    assert shown.pop() == DONE
    return [parse_event(event) or {} for event in shown], capture.record(CallStamp([9]))


def example_events(usage: Json = USAGE) -> list[bytes]:
    """Return a stream with a token that the engine's parser removed from the text."""
    last = chunk({}, [8], finish="stop")
    return [encode(ROLE), chunk({"content": "h"}, [7]), chunk({}, [9]), last, encode(usage), DONE]


def test_a_stream_is_recorded_and_the_app_sees_no_capture_fields() -> None:
    chunks, call = streamed({}, *example_events())
    assert (call.prompt_ids, call.response_ids, call.logprobs) == ([1, 2], [7, 9, 8], [-0.5] * 3)
    assert call.untrainable is None
    said = [entry["choices"][0]["delta"] for entry in chunks]
    assert said == [{"role": "assistant", "content": ""}, {"content": "h"}, {}]
    assert chunks[0]["prompt_token_ids"] is None
    assert all(entry["choices"][0].get("token_ids") is None for entry in chunks)


def test_a_usage_chunk_that_the_app_did_not_request_is_removed_and_its_fingerprint_moved() -> None:
    chunks, _ = streamed({}, *example_events())
    assert all("usage" not in entry for entry in chunks)
    assert list(chunks[-1]) == ["choices", "system_fingerprint"]
    assert [entry.get("system_fingerprint") for entry in chunks] == [None, None, "vllm"]


def test_usage_that_the_app_requested_is_kept() -> None:
    chunks, call = streamed({"stream_options": {"include_usage": True}}, *example_events())
    assert chunks[-1] == USAGE and "system_fingerprint" not in chunks[-2]
    assert call.untrainable is None


def test_usage_that_the_engine_sends_in_each_chunk_is_kept() -> None:
    reported = [encode(ROLE | {"usage": {"completion_tokens": 0}}), *example_events()[1:]]
    chunks, call = streamed({}, *reported)
    assert chunks[-1] == USAGE and call.untrainable is None


@pytest.mark.parametrize(
    ("options", "requested"),
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
def test_usage_is_requested_if_the_app_does_not_request_it(
    options: Json, requested: object
) -> None:
    upstream = ChatCapture({"stream": True} | options, {}).upstream_body()
    assert upstream.get("stream_options") == requested


def test_a_stream_with_fewer_ids_than_its_usage_is_untrainable() -> None:
    _, call = streamed({}, *example_events(USAGE | {"usage": {"completion_tokens": 4}}))
    assert call.untrainable == "missing_token_ids"


def test_a_stream_that_ends_with_an_error_is_not_recorded_and_its_last_chunk_is_sent() -> None:
    events = example_events()
    events[4] = encode({"error": {"message": "odd"}})
    chunks, call = streamed({}, *events)
    assert call is None
    assert [next(iter(entry)) for entry in chunks] == ["id", "choices", "choices", "error"]


def test_an_sse_comment_does_not_release_the_held_chunk() -> None:
    events = example_events()
    chunks, call = streamed({}, *events[:4], KEEP_ALIVE, *events[4:])
    assert chunks[-1]["system_fingerprint"] == "vllm" and call.untrainable is None


@pytest.mark.parametrize("odd", [b"data: {\n\n", b'data: {"choices": [5]}\n\n'])
def test_an_unreadable_event_is_relayed_and_the_call_is_untrainable(odd: bytes) -> None:
    capture = ChatCapture({"stream": True}, {})
    assert capture.event(odd) == odd
    for event in example_events():
        capture.event(event)
    call = capture.record(CallStamp([9]))
    assert call is not None and call.untrainable == "unreadable_answer"


@pytest.mark.parametrize("requested", [{"return_token_ids": True}, {"logprobs": True}])
def test_an_app_that_requests_tokens_sees_the_empty_deltas(requested: Json) -> None:
    chunks, _ = streamed(requested, *example_events())
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
