"""The choices of a shared call are answered and recorded as calls of their own would be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.http.answer_parts import AnswerPart, PartEncoder
from fakevllm_adapters.http.complete_choices import SentChoice
from fakevllm_adapters.vllm_compat.chat_request import parse_chat_request
from fakevllm_adapters.vllm_compat.completions import parse_completion_request
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.chat_completion import ChatCompletion
from fakevllm_server.backends.http.text_completion import TextCompletion
from fakevllm_server.rollout.capture.answer_forms import CHAT, COMPLETIONS, AnswerForms, WholeForm
from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.rollout.capture.capture_registry import CAPTURES
from fakevllm_server.rollout.capture.choice_events import EngineStreamError, whole_answer
from fakevllm_server.rollout.capture.shared_call import (
    CannotShare,
    CompleteChoice,
    SharedCapture,
)
from fakevllm_server.types.number_arrays import ids_from_bytes
from fakevllm_server.types.weight_versions import CallStamp

Json = dict[str, Any]

NUM = 3
SEED = 40
STAMP = CallStamp([0])
BUNDLED = AnswerForms("1+fakevllm")
REQUEST_ID = "r"
BODIES: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    "script": (CHAT, {"messages": [{"role": "user", "content": "[[say one END two]]"}]}),
    "completions": (COMPLETIONS, {"prompt": "hi"}),
    "prompt of ids": (COMPLETIONS, {"prompt": [104, 105]}),
}
FIELDS: dict[str, Json] = {
    "plain": {},
    "logprobs": {"logprobs": 1},
    "logprobs that null hides": {"logprobs": 1, "top_logprobs": None},
    "ids": {"return_token_ids": True, "return_weight_versions": True},
    "no ids, as a text": {"return_token_ids": "false"},
    "stop": {"stop": ["END", "s."]},
    "cut off": {"max_tokens": 2},
    "hidden reasoning": {"include_reasoning": False},
}
STREAMS: dict[str, Json] = {
    "whole": {},
    "streamed": {"stream": True},
    "usage": {"stream": True, "stream_options": {"include_usage": True}},
    "usage so far": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}


def completion(
    path: str, body: Json, *, sends_parts: bool = False
) -> ChatCompletion | TextCompletion:
    engine, raw = FakeEngine(), orjson.dumps(body)
    form = {"separates_prompt": sends_parts, "separates_choices": sends_parts}
    if path == CHAT:
        return ChatCompletion(engine, parse_chat_request(raw), REQUEST_ID, **form)
    return TextCompletion(engine, parse_completion_request(raw), REQUEST_ID, **form)


def create(path: str, body: Json) -> CallCapture:
    return CAPTURES[path](body, {})


def shared_capture(path: str, body: Json, forms: AnswerForms = BUNDLED) -> SharedCapture:
    return SharedCapture(path, body, NUM, forms, lambda body: create(path, body))


async def single(path: str, body: Json) -> tuple[Json | list[bytes], CallCapture]:
    """Return the answer to a call with one choice."""
    capture = create(path, body)
    sampled = completion(path, capture.upstream_body())
    if body.get("stream"):
        events = [encode(chunk) async for chunk in sampled.chunks()]
        raw = b"".join(map(capture.event, [*events, DONE]))
        return without_times(raw), capture
    return without_time(capture.answer(orjson.dumps(await sampled.answer()))), capture


async def shared_by_parts(path: str, body: Json) -> list[CompleteChoice]:
    """Return the choices of an engine that sends each of them when it is complete."""
    capture, encoder = shared_capture(path, body), PartEncoder()
    sampled = completion(path, capture.complete_body, sends_parts=True)
    assert sampled.separate_prompt is not None
    capture.use_prompt_ids(ids_from_bytes(sampled.separate_prompt))
    capture.read_parts(dict(encoder.headers)[b"content-type"].decode())
    choices: list[CompleteChoice] = []
    async for choice in sampled.complete_choices():
        choices += capture.feed(encoder.part(choice.to_part()))
    assert capture.is_complete
    return sorted(choices, key=lambda choice: choice.index)


async def shared(path: str, body: Json, forms: AnswerForms = BUNDLED) -> list[CompleteChoice]:
    capture = shared_capture(path, body, forms)
    sampled = completion(path, capture.upstream_body)
    choices: list[CompleteChoice] = []
    async for chunk in sampled.chunks():
        choices += capture.feed(encode(chunk))
    assert capture.is_complete
    return sorted(choices, key=lambda choice: choice.index)


SampleShared = Callable[[str, Json], Awaitable[list[CompleteChoice]]]


def without_time(raw: bytes) -> Json:
    return orjson.loads(raw) | {"created": 0}


def without_times(raw: bytes) -> list[bytes]:
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [orjson.dumps(without_time(event[6:])) for event in events[:-2]]


@pytest.mark.parametrize("sample", [shared, shared_by_parts])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("body", BODIES)
async def test_a_choice_equals_a_call_of_its_own_with_the_seed_counted_up(
    body: str, fields: str, stream: str, sample: SampleShared
) -> None:
    path, base = BODIES[body]
    request = base | FIELDS[fields] | STREAMS[stream]
    if path == CHAT and "logprobs" in request:
        request |= {"logprobs": True, "top_logprobs": request.get("top_logprobs", 1)}
    choices = await sample(path, request | {"seed": SEED})
    for index, choice in enumerate(choices):
        answer, capture = await single(path, request | {"seed": SEED + index})
        if request.get("stream"):
            assert without_times(choice.answer) == answer
        else:
            assert orjson.dumps(without_time(choice.answer)) == orjson.dumps(answer)
        recorded = choice.capture.record(STAMP)
        assert recorded is not None and recorded == capture.record(STAMP)


@pytest.mark.parametrize("sample", [shared, shared_by_parts])
async def test_tool_calls_of_a_streamed_choice_are_those_of_a_call_of_its_own(
    sample: SampleShared,
) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"left": 1}}</tool_call>'
    tool: Json = {"type": "function", "function": {"name": "add", "parameters": {}}}
    body: Json = {"messages": [{"role": "user", "content": f"[[say {call}]]"}], "tools": [tool]}
    choices = await sample(CHAT, body | {"stream": True})
    for choice in choices:
        assert b'"finish_reason":"tool_calls"' in choice.answer
        assert choice.answer.count(b'"name":"add"') == 1
        recorded = choice.capture.record(STAMP)
        assert recorded is not None and recorded.untrainable is None


def chunk(index: int, delta: Json, **fields: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": None} | fields
    return encode({"id": "c", "choices": [choice], "usage": {"completion_tokens": 1}})


def ending(index: int) -> bytes:
    return chunk(index, {"content": "x"}, finish_reason="stop")


CHAT_BODY: Json = {"messages": []}


def test_each_choice_is_complete_at_its_own_end() -> None:
    capture = shared_capture(CHAT, CHAT_BODY)
    stream = [chunk(0, {"role": "assistant"}), ending(2), ending(0)]
    found = [[choice.index for choice in capture.feed(event)] for event in stream]
    assert found == [[], [2], [0]] and not capture.is_complete
    (last,) = capture.feed(ending(1))
    assert last.index == 1 and capture.is_complete


@given(st.lists(st.integers(1, 200)))
def test_the_chunks_of_the_connection_do_not_matter(sizes: list[int]) -> None:
    raw, at = b"".join(map(ending, range(NUM))), 0
    capture, found = shared_capture(CHAT, CHAT_BODY), list[CompleteChoice]()
    for size in [*sizes, len(raw)]:
        found += capture.feed(raw[at : at + size])
        at += size
    assert [choice.index for choice in found] == [0, 1, 2]


def test_a_text_that_looks_like_the_end_of_a_choice_is_not_its_end() -> None:
    capture = shared_capture(CHAT, CHAT_BODY)
    text = '"finish_reason":"stop","choices":[{"index":1'
    assert capture.feed(chunk(0, {"role": "assistant", "content": text})) == []
    (choice,) = capture.feed(ending(0))
    assert orjson.loads(choice.answer)["choices"][0]["message"]["content"] == text + "x"


def test_an_error_event_ends_the_call() -> None:
    with pytest.raises(EngineStreamError):
        shared_capture(CHAT, CHAT_BODY).feed(encode({"error": {"message": "no", "code": 400}}))


@pytest.mark.parametrize(
    "event",
    [
        b"data: {\n\n",
        encode({"choices": [{"delta": None, "index": 0}]}),
        encode({"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}),
        encode({"choices": [{"index": 0, "delta": 1, "finish_reason": "stop"}]}),
        encode({"choices": [{"index": 0, "finish_reason": "s"}], "prompt_token_ids": [2**40]}),
    ],
)
def test_a_stream_that_is_not_vllms_cannot_be_shared(event: bytes) -> None:
    with pytest.raises(CannotShare):
        shared_capture(CHAT, CHAT_BODY).feed(event)


TOKENS: Json = {
    "token_ids": [7],
    "logprobs": [-0.5],
    "weight_versions": [],
    "allowed_tokens": None,
    "finish_reason": "stop",
}


@pytest.mark.parametrize(
    "part",
    [
        AnswerPart(0, [], b"{}"),
        SentChoice(0, {}, b"{}").to_part(),
        SentChoice(0, TOKENS | {"token_ids": [-1]}, b"{}").to_part(),
        SentChoice(0, TOKENS | {"logprobs": None}, b"{}").to_part(),
    ],
    ids=["no tokens", "empty", "id", "logprobs"],
)
def test_a_malformed_part_ends_the_sharing(part: AnswerPart) -> None:
    capture, encoder = shared_capture(CHAT, CHAT_BODY), PartEncoder()
    capture.read_parts(dict(encoder.headers)[b"content-type"].decode())
    with pytest.raises(CannotShare, match="malformed"):
        capture.feed(encoder.part(part))


def test_a_part_that_is_sent_twice_counts_once() -> None:
    capture, encoder = shared_capture(CHAT, CHAT_BODY), PartEncoder()
    capture.read_parts(dict(encoder.headers)[b"content-type"].decode())
    raw = b"".join(encoder.part(SentChoice(i, TOKENS, b"{}").to_part()) for i in (0, 0, NUM))
    assert [choice.index for choice in capture.feed(raw)] == [0]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_shared_until_the_form_of_the_engines_answers_is_known(stream: bool) -> None:
    forms = AnswerForms("0.27.1")
    body = CHAT_BODY | {"stream": stream}
    with pytest.raises(CannotShare):
        shared_capture(CHAT, body, forms)
    forms.learn_whole(CHAT, {"choices": [{"index": 0, "message": {}}], "usage": {}})
    forms.learn_usage_chunk(CHAT, {"choices": [], "usage": {"completion_tokens": 1}})
    assert shared_capture(CHAT, body, forms).upstream_body["n"] == NUM


def test_an_answer_has_the_form_of_the_engines_other_answers() -> None:
    message: Json = {"role": "assistant", "content": "a", "tool_calls": [], "reasoning": None}
    answer: Json = {
        "choices": [{"index": 0, "message": message, "logprobs": None, "token_ids": [1]}],
        "system_fingerprint": "f",
        "timings": {"a": 1},
        "usage": {"total_tokens": 2, "details": None},
        "id": "other",
    }
    form = WholeForm.of(answer)
    assert form is not None
    chunks: list[Json] = [
        {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "hm"}, "token_ids": [3]}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    built = whole_answer(CHAT, chunks, {"completion_tokens": 1, "total_tokens": 9}, form)
    message |= {"content": "hm"}
    assert orjson.dumps(built) == orjson.dumps(
        {
            "choices": [{"index": 0, "message": message, "logprobs": None, "token_ids": [3]}],
            "system_fingerprint": "f",
            "timings": None,
            "usage": {"total_tokens": 9, "details": None},
            "id": "c",
        }
    )


def test_an_answer_with_tool_calls_does_not_show_the_form() -> None:
    choice: Json = {"index": 0, "message": {"tool_calls": [{"id": "a"}]}}
    assert WholeForm.of({"choices": [choice], "usage": {}}) is None
    assert WholeForm.of({"choices": [], "usage": {}}) is None


def test_nothing_of_one_answer_is_in_the_next() -> None:
    message: Json = {"role": "assistant", "content": "secret", "audio": {"data": "secret"}}
    message |= {"annotations": ["secret"], "refusal": "secret"}
    answer: Json = {
        "choices": [{"index": 0, "message": message, "routed_experts": "secret"}],
        "usage": {"total_tokens": 2, "details": {"secret": 1}},
        "prompt_text": "secret",
        "a_later_field": "secret",
        "metrics": {"secret": 1},
    }
    usage_chunk: Json = {"choices": [], "usage": answer["usage"], "metrics": {"secret": 1}}
    forms = AnswerForms("0.27.1")
    forms.learn_whole(CHAT, answer)
    forms.learn_usage_chunk(CHAT, usage_chunk)
    for stream in (False, True):
        capture = shared_capture(CHAT, CHAT_BODY | {"stream": stream}, forms)
        (choice,) = capture.feed(chunk(0, {}) + ending(0))
        assert b"secret" not in choice.answer and b'"content":"x"' in choice.answer


def test_an_answer_has_the_text_of_its_own_prompt() -> None:
    forms = AnswerForms("0.27.1")
    message: Json = {"role": "assistant", "content": "a"}
    answer: Json = {"choices": [{"index": 0, "message": message}], "usage": {}}
    forms.learn_whole(CHAT, answer | {"prompt_text": None})
    capture = shared_capture(CHAT, CHAT_BODY, forms)
    first: Json = {"index": 1, "delta": {"role": "assistant"}, "finish_reason": None}
    assert capture.feed(encode({"choices": [first], "prompt_text": "hi"})) == []
    (choice,) = capture.feed(ending(1))
    assert orjson.loads(choice.answer)["prompt_text"] == "hi"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_whole_answers_of_an_engine_that_parses_reasoning_are_not_shared(name: str) -> None:
    forms = AnswerForms("0.27.1")
    for text in (None, "hm"):
        message: Json = {"role": "assistant", "content": "a", name: text}
        forms.learn_whole(CHAT, {"choices": [{"index": 0, "message": message}], "usage": {}})
        forms.learn_usage_chunk(CHAT, {"choices": [], "usage": {"completion_tokens": 1}})
        if text is None:
            shared_capture(CHAT, CHAT_BODY, forms)
    with pytest.raises(CannotShare, match="reasoning"):
        shared_capture(CHAT, CHAT_BODY, forms)
    shared_capture(CHAT, CHAT_BODY | {"stream": True}, forms)


def test_reasoning_in_a_shared_whole_answer_ends_the_sharing() -> None:
    forms = AnswerForms("1+fakevllm")
    capture = shared_capture(CHAT, CHAT_BODY, forms)
    (first,) = capture.feed(chunk(1, {"reasoning": "hm"}) + ending(0) + ending(1) + ending(2))
    assert first.index == 0 and forms.parses_reasoning
    with pytest.raises(CannotShare, match="reasoning"):
        capture.feed(ending(2))
