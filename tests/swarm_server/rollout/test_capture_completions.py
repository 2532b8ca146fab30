from typing import Any

import orjson
import pytest

from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event
from fakevllm_server.rollout.capture.completion_tokens import CompletionsCapture
from fakevllm_server.types.weight_versions import CallStamp

Json = dict[str, Any]
STAMP = CallStamp([9])


def legacy(*logprobs: float) -> Json:
    return {
        "text_offset": list(range(len(logprobs))),
        "token_logprobs": list(logprobs),
        "tokens": ["x"] * len(logprobs),
        "top_logprobs": [{"x": logprob} for logprob in logprobs],
    }


def answer() -> Json:
    """Return an answer as vLLM prints it for a captured request."""
    choice = {
        "index": 0,
        "text": "hi",
        "logprobs": legacy(-0.1, -0.2),
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [7, 8],
        "prompt_logprobs": None,
        "prompt_token_ids": [1, 2],
        "routed_experts": None,
    }
    return {"choices": [choice], "usage": {"completion_tokens": 2}}


def shown_to(body: Json, reply: Json | None = None) -> Json:
    capture = CompletionsCapture(body, {})
    return orjson.loads(capture.answer(orjson.dumps(reply or answer())))


def recorded(body: Json, reply: Json | None = None) -> Any:
    capture = CompletionsCapture(body, {})
    capture.answer(orjson.dumps(reply or answer()))
    return capture.record(STAMP)


def test_ids_and_logprobs_are_the_engines_own() -> None:
    call = recorded({"prompt": "a"})
    assert (call.prompt_ids, call.response_ids, call.logprobs) == ([1, 2], [7, 8], [-0.1, -0.2])
    assert [(span.version, span.start, span.end) for span in call.versions] == [(9, 0, 2)]
    assert call.untrainable is None


def test_the_version_that_the_engine_reports_is_used() -> None:
    reply = answer()
    reply["choices"][0]["weight_versions"] = [{"version": 3, "start": 0, "end": 2}]
    assert recorded({"prompt": "a"}, reply).version == 3
    assert shown_to({"prompt": "a"}, reply)["choices"][0]["weight_versions"] is None


def test_fields_that_the_app_did_not_request_are_null_and_in_the_same_order() -> None:
    (choice,) = shown_to({"prompt": "a"})["choices"]
    assert list(choice) == list(answer()["choices"][0])
    hidden = ("logprobs", "token_ids", "prompt_token_ids")
    assert [choice[name] for name in hidden] == [None] * 3


def test_fields_that_the_app_requested_are_kept() -> None:
    requested: Json = {"prompt": "a", "logprobs": 0, "return_token_ids": True}
    assert shown_to(requested) == answer()


@pytest.mark.parametrize(
    ("requested", "sent"),
    [
        ({}, 0),
        ({"logprobs": None}, 0),
        ({"logprobs": 0}, 0),
        ({"logprobs": 3}, 3),
        ({"logprob_token_ids": [5]}, None),
    ],
)
def test_logprobs_are_requested_unless_the_app_requests_them_or_the_engine_would_refuse(
    requested: Json, sent: int | None
) -> None:
    upstream = CompletionsCapture({"prompt": "a", "frobnicate": 1} | requested, {}).upstream_body()
    assert upstream.get("logprobs") == sent
    assert (upstream["return_token_ids"], upstream["frobnicate"]) == (True, 1)
    assert "top_logprobs" not in upstream and "stream_options" not in upstream


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [(None, "missing_logprob"), ([-0.1], "missing_logprob"), ([-0.1, None], "missing_logprob")],
)
def test_a_missing_logprob_is_never_padded(logprobs: list[float] | None, reason: str) -> None:
    reply = answer()
    shown = None if logprobs is None else legacy(*logprobs)
    reply["choices"][0]["logprobs"] = shown
    assert recorded({"prompt": "a"}, reply).untrainable == reason


def test_a_call_not_sampled_from_the_whole_distribution_is_untrainable() -> None:
    call = recorded({"prompt": "a", "top_p": 0.5})
    assert call.untrainable == "sampling_not_trainable: top_p"


@pytest.mark.parametrize("odd", [[], 5, [{"index": 0, "logprobs": 3}], [None]])
def test_an_unreadable_answer_is_relayed_unchanged_and_untrainable(odd: Any) -> None:
    raw = orjson.dumps({"choices": odd, "usage": 3})
    capture = CompletionsCapture({"prompt": "a"}, {})
    assert capture.answer(raw) == raw
    call = capture.record(STAMP)
    assert call is not None and call.untrainable == "unreadable_answer"


def chunk(text: str, id: int, finish: str | None = None, prompt: Any = None) -> bytes:
    choice = {
        "index": 0,
        "text": text,
        "logprobs": legacy(-0.5),
        "finish_reason": finish,
        "stop_reason": None,
        "prompt_token_ids": prompt,
        "token_ids": [id],
    }
    return encode({"id": "1", "choices": [choice]})


USAGE: Json = {
    "id": "1",
    "choices": [],
    "usage": {"completion_tokens": 3},
    "system_fingerprint": "vllm",
}
EVENTS = [
    chunk("h", 7, prompt=[1, 2]),
    chunk("", 9),
    chunk("i", 8, "length"),
    encode(USAGE),
    DONE,
]


def streamed(body: Json, *events: bytes) -> tuple[list[Json], Any]:
    """Capture a stream; return the chunks that the app sees, and the record."""
    capture = CompletionsCapture({"prompt": "a", "stream": True} | body, {})
    shown = SseDecoder().feed(b"".join(map(capture.event, events)))
    assert shown.pop() == DONE
    return [parse_event(event) or {} for event in shown], capture.record(STAMP)


def test_a_stream_is_recorded_and_the_app_sees_no_capture_fields() -> None:
    chunks, call = streamed({}, *EVENTS)
    assert (call.prompt_ids, call.response_ids, call.logprobs) == ([1, 2], [7, 9, 8], [-0.5] * 3)
    assert call.untrainable is None
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["h", "", "i"]
    for name in ("logprobs", "token_ids", "prompt_token_ids"):
        assert [choice[name] for choice in choices] == [None] * 3
    assert [chunk.get("system_fingerprint") for chunk in chunks] == [None, None, "vllm"]


def test_a_stream_is_unchanged_if_the_app_requested_all_fields() -> None:
    requested: Json = {
        "logprobs": 0,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    chunks, _ = streamed(requested, *EVENTS)
    assert chunks == [parse_event(event) for event in EVENTS[:-1]]


def test_a_stream_that_ends_with_an_error_is_not_recorded() -> None:
    chunks, call = streamed({}, *EVENTS[:3], encode({"error": {"message": "odd"}}), DONE)
    assert call is None
    assert [next(iter(chunk)) for chunk in chunks] == ["id", "id", "id", "error"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": []},
        {"prompt": None},
        {},
        {"prompt": 3},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "n": "odd"},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "prompt_logprobs": 0},
        {"prompt": "a", "suffix": ""},
        {"prompt": "a", "use_beam_search": True},
        {"prompt": "a", "prompt_embeds": "x"},
    ],
)
def test_a_call_other_than_one_continuation_of_one_prompt_is_not_captured(body: Json) -> None:
    assert CompletionsCapture.cannot_capture(body)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a"},
        {"prompt": ["a"]},
        {"prompt": [1, 2]},
        {"prompt": [[1, 2]], "n": 1, "echo": False, "prompt_logprobs": None},
    ],
)
def test_one_continuation_of_one_prompt_is_captured(body: Json) -> None:
    assert not CompletionsCapture.cannot_capture(body)
