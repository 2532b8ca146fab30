from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
import pytest

from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.vllm_compat.completions import parse_completion_request
from fakevllm_server.backends.fake.byte_tokens import EOS
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.text_completion import TextCompletion
from fakevllm_server.types.sampling import Sampling, Token

Json = dict[str, Any]


def completion(
    fields: Json, engine: FakeEngine | None = None, request_id: str | None = None
) -> TextCompletion:
    raw = orjson.dumps({"prompt": "[[say Hi]]"} | fields)
    return TextCompletion(engine or FakeEngine(), parse_completion_request(raw), request_id)


async def answer(fields: Json, engine: FakeEngine | None = None) -> Json:
    return await completion(fields, engine).answer()


async def read_chunks(fields: Json, engine: FakeEngine | None = None) -> list[Json]:
    return [chunk async for chunk in completion(fields | {"stream": True}, engine).chunks()]


def refusal(fields: Json) -> Json:
    with pytest.raises(WireError) as refused:
        completion(fields)
    assert refused.value.status == refused.value.body["error"]["code"]
    return refused.value.body["error"]


REPORT_ALL: Json = {"return_token_ids": True, "logprobs": 0, "return_weight_versions": True}


async def test_an_answer_has_vllms_keys_in_vllms_order_including_nulls() -> None:
    body = await answer({})
    assert list(body) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint"),
        *("usage", "kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    (choice,) = body["choices"]
    assert list(choice) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"),
        *("prompt_logprobs", "prompt_token_ids", "routed_experts", "weight_versions"),
    ]
    assert [key for key, value in choice.items() if value is not None] == [
        *("index", "text", "finish_reason"),
    ]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "stop")
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert list(body["usage"]) == [
        *("prompt_tokens", "total_tokens", "completion_tokens"),
        *("prompt_tokens_details", "completion_tokens_details"),
    ]


async def test_each_token_has_a_chunk_and_the_last_has_the_finish_reason() -> None:
    chunks = await read_chunks({})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["H", "i", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert list(chunks[0]["choices"][0]) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason"),
        *("prompt_token_ids", "token_ids", "weight_versions"),
    ]
    plain = ["id", "object", "created", "model", "choices"]
    assert list(chunks[0]) == [*plain, "kv_transfer_params"]
    assert list(chunks[-1]) == [*plain, "system_fingerprint", "kv_transfer_params"]


async def test_ids_logprobs_and_versions_are_reported_on_request() -> None:
    (choice,) = (await answer(REPORT_ALL))["choices"]
    assert choice["token_ids"] == [*b"Hi", EOS]
    assert choice["prompt_token_ids"] == list(b"[[say Hi]]")
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 3}]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [0.0, 0.0, 0.0],
        "tokens": ["H", "i", "<|end|>"],
        "top_logprobs": [{"H": 0.0}, {"i": 0.0}, {"<|end|>": 0.0}],
    }


async def test_a_stream_has_the_prompt_ids_once_and_text_offsets_that_continue() -> None:
    choices = [chunk["choices"][0] for chunk in await read_chunks(REPORT_ALL)]
    prompts = [choice["prompt_token_ids"] for choice in choices]
    assert prompts == [list(b"[[say Hi]]"), None, None]
    assert [choice["token_ids"] for choice in choices] == [[72], [105], [EOS]]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0], [1], [2]]
    spans = [choice["weight_versions"] for choice in choices]
    assert spans == [None, None, [{"version": 0, "start": 0, "end": 3}]]


async def test_logprobs_can_name_tokens_by_their_ids() -> None:
    (choice,) = (await answer({"logprobs": 1, "return_tokens_as_token_ids": True}))["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:72", "token_id:105", f"token_id:{EOS}"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:72": 0.0}


PROMPTS: list[Any] = [
    "[[say Hi]]",
    ["[[say Hi]]"],
    list(b"[[say Hi]]"),
    [list(b"[[say Hi]]")],
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "texts", "ids", "lists of ids"])
async def test_each_form_of_a_prompt_gives_the_same_answer(prompt: Any) -> None:
    body = await answer({"prompt": prompt, "return_token_ids": True})
    (choice,) = body["choices"]
    assert (choice["text"], choice["prompt_token_ids"]) == ("Hi", list(b"[[say Hi]]"))


async def test_each_prompt_has_its_own_choices_and_usage_is_the_sum() -> None:
    fields: Json = {"prompt": ["[[say a]]", "[[say b]]"], "n": 2, "return_token_ids": True}
    body = await answer(fields)
    shown = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert shown == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (18, 8)
    chunks = await read_chunks(fields)
    texts = ["", "", "", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["a", "a", "b", "b"]


async def test_the_default_token_limit_is_sixteen() -> None:
    for fields in ({}, {"max_tokens": None}):
        body = await answer({"prompt": f"[[say {'a' * 20}]]"} | fields)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a" * 16, "length")


async def test_the_chunk_at_the_token_limit_has_its_text_and_the_finish_reason() -> None:
    chunks = await read_chunks({"max_tokens": 2})
    ends = [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]
    assert ends == [("H", None), ("i", "length")]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_string_is_reported_and_cut_from_the_text(is_streamed: bool) -> None:
    fields: Json = {"prompt": "[[say one END two]]", "stop": "END", "max_tokens": 40}
    if is_streamed:
        choices = [chunk["choices"][0] for chunk in await read_chunks(fields)]
        text, last = "".join(choice["text"] for choice in choices), choices[-1]
    else:
        (last,) = (await answer(fields))["choices"]
        text = last["text"]
    assert (text, last["finish_reason"], last["stop_reason"]) == ("one ", "stop", "END")


async def test_text_held_back_for_a_stop_string_is_not_lost_at_the_end() -> None:
    choices = [c["choices"][0] for c in await read_chunks({"prompt": "[[say xEN]]", "stop": "END"})]
    assert "".join(choice["text"] for choice in choices) == "xEN"
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]


@pytest.mark.parametrize("continuous", [False, True])
async def test_usage_is_in_the_last_chunk_or_on_request_in_each_chunk(continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    chunks = await read_chunks({"stream_options": options})
    last = chunks.pop()
    usage = {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3}
    assert (last["choices"], last["usage"]) == ([], usage)
    assert last["system_fingerprint"] and "system_fingerprint" not in chunks[-1]
    counted = [chunk.get("usage", {}).get("completion_tokens") for chunk in chunks]
    assert counted == ([1, 2, 3] if continuous else [None] * 3)


async def test_an_echo_precedes_the_text() -> None:
    (choice,) = (await answer({"echo": True}))["choices"]
    assert choice["text"] == "[[say Hi]]Hi"
    (choice,) = (await answer({"echo": True, "prompt": list(b"[[say Hi]]")}))["choices"]
    assert choice["text"] == "[[say Hi]]Hi"
    chunks = await read_chunks({"echo": True})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["[[say Hi]]H", "i", ""]


async def test_an_echo_with_zero_tokens_has_only_the_prompt() -> None:
    fields: Json = {"echo": True, "max_tokens": 0}
    (choice,) = (await answer(fields))["choices"]
    assert choice["text"] == "[[say Hi]]"
    assert [chunk["choices"][0]["text"] for chunk in await read_chunks(fields)] == ["[[say Hi]]"]


async def test_the_request_id_becomes_the_answers_id() -> None:
    assert (await completion({}, None, "abc").answer())["id"] == "cmpl-abc"
    assert (await answer({"request_id": "mine"}))["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "message"),
    [
        ({"prompt": None}, "BadRequestError", "prompt", "Either prompt or prompt_embeds"),
        ({"prompt": ""}, "BadRequestError", "prompt", "Either prompt or prompt_embeds"),
        ({"prompt": []}, "BadRequestError", None, "cannot be empty"),
        ({"prompt": ["a"] * 1025}, "BadRequestError", "prompt", "exceeds the maximum allowed"),
        ({"prompt": {"a": 1}}, "Bad Request", None, "validation error"),
        ({"n": None}, "Bad Request", "body.n", "valid integer"),
        ({"max_tokens": "x"}, "Bad Request", "body.max_tokens", "int_parsing"),
        ({"suffix": "x"}, "BadRequestError", None, "suffix is not currently supported"),
        ({"logprobs": -1}, "BadRequestError", "logprobs", "must be a positive value."),
        ({"logprobs": "x"}, "BadRequestError", "logprobs", "must be an integer."),
        ({"logprobs": 21}, "BadRequestError", None, "greater than max allowed: 20"),
        ({"stream_options": {"a": 1}}, "BadRequestError", "stream_options", "`stream=True`"),
        ({"temperature": -1}, "BadRequestError", "temperature", "must be non-negative"),
        ({"n": 3, "temperature": 0}, "BadRequestError", None, "greedy sampling, got 3."),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens", "must be at least 1, got 0."),
        ({"max_tokens": 10**7}, "BadRequestError", "max_tokens", "greater than max_model_len"),
        ({"prompt": [1] * 131072}, "BadRequestError", "input_tokens", "maximum context length"),
        ({"model": "zz"}, "NotFoundError", "model", "does not exist. Valid aliases: fake."),
        ({"echo": True, "logprobs": 1}, "BadRequestError", "logprobs with echo", "not supported"),
        ({"prompt_logprobs": 1}, "BadRequestError", "prompt_logprobs", "not supported"),
    ],
)
def test_an_invalid_request_is_refused_in_vllms_words(
    fields: Json, kind: str, param: str | None, message: str
) -> None:
    error = refusal(fields)
    assert error["type"] == kind and message in error["message"]
    assert param is None or error["param"] == param


def test_fields_of_chat_are_ignored_as_vllm_ignores_them() -> None:
    fields: Json = {"messages": 3, "tools": [], "tool_choice": "odd", "top_logprobs": 5}
    request = parse_completion_request(orjson.dumps({"prompt": "a", "frobnicate": 1} | fields))
    assert request.prompts == ["a"] and not request.common.tools


class RecordingEngine(FakeEngine):
    """An engine that records the sampling of each call. With `fails`, the first call waits forever
    and the second is refused."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.samplings: list[Sampling] = []
        self.num_cancelled = 0
        self._fails = fails

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        self.samplings.append(sampling)
        if self._fails and len(self.samplings) == 2:
            raise unavailable("Too many requests are waiting.")
        try:
            if self._fails:
                await asyncio.Event().wait()
        finally:
            self.num_cancelled += self._fails
        yield [Token(EOS, 0.0, 0, [])]


async def test_each_continuation_has_the_next_seed() -> None:
    engine = RecordingEngine()
    await answer({"n": 3, "seed": 5, "prompt": ["a", "b"]}, engine)
    assert [sampling.seed for sampling in engine.samplings] == [5, 6, 7] * 2


async def test_when_one_choice_fails_the_others_are_cancelled_and_its_error_is_raised() -> None:
    engine = RecordingEngine(fails=True)
    with pytest.raises(WireError) as refused:
        await answer({"n": 2}, engine)
    assert refused.value.status == 503 and engine.num_cancelled == 1


class EndlessEngine(FakeEngine):
    """An engine that samples one token and then waits until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        try:
            yield [Token(ord("a"), 0.0, 0, [])]
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def test_closing_a_stream_cancels_the_sampling() -> None:
    engine = EndlessEngine()
    chunks = completion({"stream": True}, engine).chunks()
    assert (await anext(chunks))["choices"][0]["text"] == "a"
    assert not engine.is_closed
    await chunks.aclose()
    assert engine.is_closed
