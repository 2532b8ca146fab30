import itertools
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.base import EngineInfo, Json, NotTranslated
from fakevllm_adapters.formats.responses.input import answer_as_input, messages_of
from fakevllm_adapters.formats.responses.request import ResponsesRequest
from fakevllm_adapters.formats.sse import DONE, encode
from tests.adapters.formats.responses_exchanges import (
    NEW,
    OLD,
    RESPONSES,
    call_delta,
    chat_stream,
    completion,
    kinds,
    opened,
    streamed,
    text_item,
)

PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=4)


@given(PIECES, PIECES, st.lists(PIECES, max_size=3), st.sampled_from(["stop", "length"]))
def test_a_stream_has_the_items_of_the_whole_answer_however_it_is_split(
    reasoning: list[str], text: list[str], calls: list[list[str]], finish: str
) -> None:
    deltas: list[Json] = [{"reasoning": piece} for piece in reasoning]
    deltas += [{"content": piece} for piece in text]
    for index, pieces in enumerate(calls):
        deltas.append(call_delta(index, f"f{index}", ""))
        deltas += [call_delta(index, None, piece) for piece in pieces]
    message: Json = {"reasoning": "".join(reasoning), "content": "".join(text)}
    message["tool_calls"] = [
        {
            "id": f"chatcmpl-tool-f{index}",
            "function": {"name": f"f{index}", "arguments": "".join(pieces)},
        }
        for index, pieces in enumerate(calls)
    ]
    events = streamed(opened(stream=True), chat_stream(deltas, finish))
    whole = orjson.loads(opened().answer(completion(message, finish)))
    assert list(map(comparable, events[-1]["response"]["output"])) == list(
        map(comparable, whole["output"])
    )
    grouped = itertools.groupby(event["output_index"] for event in events if "item" in event)
    assert [index for index, _ in grouped] == list(range(len(whole["output"])))


def comparable(item: Json) -> Json:
    """Return an item without the ids and reasoning status that differ in vLLM's streams."""
    left = {"id"} | ({"status"} if item["type"] == "reasoning" else set[str]())
    return {key: value for key, value in item.items() if key not in left}


KEYS = st.sampled_from(
    [
        *("choices", "usage", "model", "delta", "message", "content", "reasoning", "tool_calls"),
        *("function", "name", "arguments", "id", "index", "finish_reason", "logprobs", "token"),
        *("prompt_tokens", "completion_tokens", "top_logprobs", "logprob", "error", "code"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
ODD: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5)
)
ODD_CHUNKS = st.fixed_dictionaries({"choices": st.lists(ODD, max_size=2)}, optional={"usage": ODD})


@given(st.lists(ODD_CHUNKS.map(encode) | ODD.map(encode) | st.binary(max_size=9), max_size=4))
def test_an_odd_stream_ends_with_exactly_one_final_event(chat: list[bytes]) -> None:
    request: Json = {"include": ["message.output_text.logprobs"], "stream": True}
    events = streamed(opened(**request), [*chat, DONE])
    last = {"completed", "incomplete", "failed"}
    assert [kind in last for kind in kinds(events)] == [False] * (len(events) - 1) + [True]


@given(ODD | st.fixed_dictionaries({"choices": st.lists(ODD, min_size=1)}))
def test_an_odd_answer_is_translated_or_raises_value_error(odd: Any) -> None:
    try:
        raw = opened().answer(orjson.dumps(odd))
    except ValueError:
        return
    assert orjson.loads(raw)["object"] == "response"


TEXTS = st.text(max_size=8)
CALLS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=3)


def answer_of(text: str, reasoning: str, calls: list[tuple[str, str, str]] | None) -> Json:
    answer: Json = {"role": "assistant", "content": text}
    if reasoning:
        answer["reasoning"] = reasoning
    if calls:
        answer["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return answer


ANSWERS = st.builds(answer_of, TEXTS.filter(bool), TEXTS, st.none() | CALLS)


@given(ANSWERS)
def test_an_answer_that_the_app_sends_back_is_the_same_message(answer: Json) -> None:
    assert messages_of(None, answer_as_input(answer)) == [answer]


@given(st.lists(st.tuples(st.sampled_from(["user", "system", "developer"]), st.lists(TEXTS))))
def test_no_text_of_the_input_is_lost(request: list[tuple[str, list[str]]]) -> None:
    messages = messages_of(None, [text_item(role, *texts) for role, texts in request])
    translated = [(each["role"], [part["text"] for part in each["content"]]) for each in messages]
    assert translated == request


NAMES = st.sampled_from(
    [
        *ResponsesRequest.model_fields,
        *("type", "role", "content", "text", "name", "tools", "output", "summary", "arguments"),
    ]
)
WORDS = st.sampled_from(
    [
        *("message", "function_call", "function_call_output", "reasoning", "input_text"),
        *("function", "namespace", "user", "assistant", "auto", "required", "json_schema"),
    ]
)
BODY_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=4)
JSON: st.SearchStrategy[Any] = st.recursive(
    BODY_LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
)


@given(st.dictionaries(NAMES, JSON), JSON, st.sampled_from([OLD, NEW]))
def test_an_odd_body_is_translated_or_raises_not_translated(
    body: Json, odd: Any, engine: EngineInfo
) -> None:
    try:
        exchange = RESPONSES.open({"input": odd} | body, engine)
    except NotTranslated:
        return
    assert orjson.loads(orjson.dumps(exchange.body, default=str))["messages"] is not None
