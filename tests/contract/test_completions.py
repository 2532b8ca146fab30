"""Contract tests of the rollout engines: /v1/completions, tokenization and small routes.

The engines are those of conftest.py. `contract.rollouts.ABILITIES` lists the deliberate
differences between engines.
"""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from contract.rollouts import (
    CHAT,
    MAX_ATTEMPTS,
    Answer,
    CapturedAnswer,
    Json,
    Rig,
    SentAnswer,
    chunks_of,
    shape_of,
    user,
)

from fakevllm_server.rollout.capture.capture_registry import CAPTURES
from fakevllm_server.types.calls import RecordedCall

pytestmark = pytest.mark.asyncio(loop_scope="package")

ENGINES = [
    "fake",
    "embedded",
    pytest.param("vllm", marks=[pytest.mark.real, pytest.mark.timeout(300)]),
]
PATH = "/v1/completions"
GREEDY: Json = {"temperature": 0}
TOKENS: Json = {"return_token_ids": True, "logprobs": 0}
USAGE: Json = {"stream_options": {"include_usage": True}}


def body(rig: Rig, fields: Json) -> Json:
    """Return the request with default fields; fields that are None are removed."""
    shared: Json = {
        "model": rig.endpoint.model_name,
        "max_tokens": 8,
        "prompt": rig.abilities.question,
    }
    return {name: value for name, value in (shared | fields).items() if value is not None}


async def send(rig: Rig, fields: Json, path: str = PATH) -> Answer:
    fields = body(rig, fields) if path == PATH else fields
    async with rig.http.post(path, json=fields) as answer:
        return Answer(answer.status, await answer.json())


async def stream(rig: Rig, fields: Json) -> list[Json]:
    async with rig.http.post(PATH, json=body(rig, fields | {"stream": True})) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        return chunks_of(await answer.read())


async def capture_call(rig: Rig, fields: Json) -> CapturedAnswer:
    """Send a request as the server does, through the weight gate and with a capture."""
    sent = SentAnswer()
    records: list[RecordedCall | None] = []
    endpoint = rig.endpoint

    async def finished() -> None:
        records.append(capture.record(stamp))

    async with endpoint.gate.call() as stamp:
        capture = CAPTURES[PATH](body(rig, fields), endpoint.default_sampling, endpoint.refusal)
        await rig.client.capture(
            PATH,
            capture,
            {"Content-Type": "application/json"},
            sent,
            finished,
        )
    return CapturedAnswer(sent.status, sent.body, records[0] if records else None)


def text_of(chunks: list[Json]) -> str:
    return "".join(choice["text"] for choice in choices_of(chunks))


def choices_of(chunks: list[Json]) -> list[Json]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def chunk_shapes(chunks: list[Json]) -> list[Any]:
    """Return the shapes of the chunks in order, without repetitions.

    The number of tokens in a chunk depends on chance.
    """
    return [shape for shape, _ in itertools.groupby(map(shape_of, chunks))]


REQUESTS: list[Json] = [{}, {"logprobs": 2}, {"return_token_ids": True}, TOKENS]


@pytest.mark.parametrize("fields", REQUESTS)
async def test_capture_does_not_change_an_answer(rig: Rig, fields: Json) -> None:
    plain = await send(rig, GREEDY | fields)
    captured_json = orjson.loads((await capture_call(rig, GREEDY | fields)).body)
    assert shape_of(captured_json) == shape_of(plain.json)
    assert captured_json["choices"] == plain.json["choices"]


@pytest.mark.parametrize("usage", [{}, USAGE])
@pytest.mark.parametrize("fields", REQUESTS)
async def test_capture_does_not_change_a_stream(rig: Rig, fields: Json, usage: Json) -> None:
    fields = GREEDY | {"max_tokens": 4} | fields | usage
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        plain = await stream(rig, fields)
        captured_chunks = chunks_of((await capture_call(rig, fields | {"stream": True})).body)
        assert text_of(captured_chunks) == text_of(plain)
        if chunk_shapes(captured_chunks) == chunk_shapes(plain):
            return
        assert attempts_left and rig.name == "vllm", (
            chunk_shapes(captured_chunks),
            chunk_shapes(plain),
        )


@pytest.mark.parametrize("streams", [False, True])
async def test_a_captured_call_is_complete(rig: Rig, streams: bool) -> None:
    await rig.rollout.load_weights(rig.folders[0], 7)
    record = (await capture_call(rig, {"seed": 3, "stream": streams})).record
    assert record.untrainable is None and record.temperature == 1.0
    assert record.logprobs is not None
    assert len(record.logprobs) == len(record.response_ids) > 0
    spans = [(span.version, span.start, span.end) for span in record.versions]
    assert spans == [(7, 0, len(record.response_ids))]
    fields = {"prompt": rig.abilities.question, "model": rig.endpoint.model_name}
    assert record.prompt_ids == (await send(rig, fields, "/tokenize")).json["tokens"]


async def test_a_stream_has_the_same_content_as_a_plain_answer(rig: Rig) -> None:
    chunks = await stream(rig, GREEDY | TOKENS | USAGE)
    body = (await send(rig, GREEDY | TOKENS)).json
    (whole,) = body["choices"]
    *content_chunks, last = chunks
    choices = choices_of(content_chunks)
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    ids = [id for choice in choices for id in choice["token_ids"]]
    assert ids == whole["token_ids"]
    logprobs = [lp for choice in choices for lp in choice["logprobs"]["token_logprobs"]]
    assert logprobs == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-3)
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any(choice["prompt_token_ids"] for choice in choices[1:])
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes[-1] == whole["finish_reason"] and not any(finishes[:-1])
    usage = {key: value for key, value in body["usage"].items() if value is not None}
    assert (last["choices"], last["usage"]) == ([], usage)


async def test_each_chunk_of_a_stream_may_have_usage(rig: Rig) -> None:
    options: Json = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(rig, GREEDY | {"stream_options": options, "ignore_eos": True})
    *counts, last = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last
    keys = ["prompt_tokens", "total_tokens", "completion_tokens"]
    assert all(list(chunk["usage"]) == keys for chunk in chunks)


async def test_the_most_likely_tokens_are_reported_with_the_sampled_one(rig: Rig) -> None:
    (choice,) = (await send(rig, GREEDY | {"logprobs": 1, "max_tokens": 2})).json["choices"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert len({len(column) for column in logprobs.values()}) == 1
    for token, logprob, tops in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert tops[token] == logprob and 1 <= len(tops) <= 2
    assert logprobs["text_offset"][0] == 0


async def test_a_prompt_of_ids_has_the_same_answer_as_its_text(rig: Rig) -> None:
    fields = {"prompt": rig.abilities.question, "model": rig.endpoint.model_name}
    ids = (await send(rig, fields, "/tokenize")).json["tokens"]
    forms: list[Any] = [rig.abilities.question, [rig.abilities.question], ids, [ids]]
    answers = [await send(rig, GREEDY | TOKENS | {"prompt": form}) for form in forms]
    choices = [answer.json["choices"][0] for answer in answers]
    assert [choice["prompt_token_ids"] for choice in choices] == [ids] * 4
    assert [choice["text"] for choice in choices] == [choices[0]["text"]] * 4


async def test_each_of_several_prompts_has_its_choices(rig: Rig) -> None:
    fields: Json = {"prompt": ["a b", "c"], "n": 2, "return_token_ids": True}
    body = (await send(rig, fields)).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"] for choice in body["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert body["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    indices = {choice["index"] for choice in choices_of(await stream(rig, fields))}
    assert indices == {0, 1, 2, 3}


async def test_a_stop_string_cuts_the_text_and_not_the_ids(rig: Rig) -> None:
    question, stop, before = rig.abilities.stop
    fields = GREEDY | TOKENS | {"prompt": question, "stop": [stop], "max_tokens": 40}
    body = (await send(rig, fields)).json
    (choice,) = body["choices"]
    if choice["finish_reason"] == "stop":
        assert stop not in choice["text"] and (not before or choice["text"] == before)
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    streamed = choices_of(await stream(rig, fields))
    assert "".join(piece["text"] for piece in streamed) == choice["text"]
    assert streamed[-1]["stop_reason"] == choice["stop_reason"]


async def test_an_echo_precedes_the_text(rig: Rig) -> None:
    (plain,) = (await send(rig, GREEDY)).json["choices"]
    (echoed,) = (await send(rig, GREEDY | {"echo": True})).json["choices"]
    assert echoed["text"] == rig.abilities.question + plain["text"]
    chunks = choices_of(await stream(rig, GREEDY | {"echo": True}))
    assert "".join(choice["text"] for choice in chunks) == echoed["text"]
    (alone,) = (await send(rig, GREEDY | {"echo": True, "max_tokens": 0})).json["choices"]
    assert alone["text"] == rig.abilities.question


async def test_the_answers_id_has_the_request_id(rig: Rig) -> None:
    async with rig.http.post(PATH, json=body(rig, {}), headers={"X-Request-Id": "abc"}) as answer:
        assert (await answer.json())["id"] == "cmpl-abc"


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"prompt": None}, 400, "BadRequestError"),
        ({"prompt": ""}, 400, "BadRequestError"),
        ({"prompt": {"a": 1}}, 400, "Bad Request"),
        ({"model": "nobody"}, 404, "NotFoundError"),
        ({"max_tokens": 10**7}, 400, "BadRequestError"),
        ({"max_tokens": "x"}, 400, "Bad Request"),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError"),
        ({"logprobs": -1}, 400, "BadRequestError"),
        ({"temperature": -1}, 400, "BadRequestError"),
        ({"suffix": "x"}, 400, "BadRequestError"),
        ({"n": 2, "temperature": 0}, 400, "BadRequestError"),
    ],
)
async def test_an_invalid_request_is_refused_in_vllms_format(
    rig: Rig, fields: Json, status: int, kind: str
) -> None:
    answer = await send(rig, fields)
    assert answer.status == status
    error = answer.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == (kind, status)
    captured = await capture_call(rig, fields)
    assert (captured.status, captured.call) == (status, None)
    assert orjson.loads(captured.body) == answer.json, "capture must not change a refusal"


async def test_a_conversation_is_tokenized_as_in_a_chat_request(rig: Rig) -> None:
    fields: Json = {"messages": user("hi"), "model": rig.endpoint.model_name}
    tokenized = (await send(rig, fields | {"return_token_strs": True}, "/tokenize")).json
    assert list(tokenized) == ["count", "max_model_len", "tokens", "token_strs"]
    chat = (await send(rig, fields | {"return_token_ids": True, "max_tokens": 1}, CHAT)).json
    assert tokenized["tokens"] == chat["prompt_token_ids"]
    assert len(tokenized["token_strs"]) == tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == rig.endpoint.max_model_len
    back: Json = {"tokens": tokenized["tokens"], "model": rig.endpoint.model_name}
    text = (await send(rig, back, "/detokenize")).json
    assert list(text) == ["prompt"] and "hi" in text["prompt"]


async def test_an_answer_is_rendered_behind_the_prompt_of_its_conversation(rig: Rig) -> None:
    """Users' edits are trained with the ids that follow those of the recorded prompt."""
    prompt = (await send(rig, {"messages": user("hi")}, "/tokenize")).json["tokens"]
    answer: Json = {"role": "assistant", "content": "An edited answer."}
    fields: Json = {"messages": [*user("hi"), answer], "add_generation_prompt": False}
    whole = (await send(rig, fields, "/tokenize")).json["tokens"]
    assert whole[: len(prompt)] == prompt and len(whole) > len(prompt)
    with_next_turn = (await send(rig, {"messages": fields["messages"]}, "/tokenize")).json["tokens"]
    assert with_next_turn[: len(whole)] == whole and len(with_next_turn) > len(whole)
    back: Json = {"tokens": whole[len(prompt) :]}
    assert "An edited answer." in (await send(rig, back, "/detokenize")).json["prompt"]


async def test_a_continued_answer_is_rendered_behind_the_prompt_that_it_continues(rig: Rig) -> None:
    begin: Json = {"role": "assistant", "content": "An edited"}
    fields: Json = {"add_generation_prompt": False, "messages": [*user("hi"), begin]}
    request = fields | {"continue_final_message": True}
    prompt = (await send(rig, request, "/tokenize")).json["tokens"]
    answer = begin | {"content": "An edited answer."}
    fields |= {"messages": [*user("hi"), answer]}
    whole = (await send(rig, fields, "/tokenize")).json["tokens"]
    assert whole[: len(prompt)] == prompt
    text = (await send(rig, {"tokens": whole[len(prompt) :]}, "/detokenize")).json["prompt"]
    assert text.startswith(" answer.")


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/health", 200, b""),
        ("GET", "/ping", 200, b""),
        ("POST", "/ping", 200, b""),
        ("GET", "/load", 200, b'{"server_load":0}'),
        ("HEAD", "/health", 405, b""),
        ("GET", "/v1/models/contract", 404, b'{"detail":"Not Found"}'),
        ("GET", "/v1/completions", 405, b'{"detail":"Method Not Allowed"}'),
    ],
)
async def test_the_small_routes_answer_as_in_vllm(
    rig: Rig, method: str, path: str, status: int, body: bytes
) -> None:
    async with rig.http.request(method, path) as answer:
        assert (answer.status, await answer.read()) == (status, body)
        assert (answer.headers.get("allow") is not None) == (status == 405)


async def test_metrics_have_the_names_that_autoscalers_read(rig: Rig) -> None:
    await send(rig, {})
    async with rig.http.get("/metrics") as answer:
        assert answer.status == 200 and answer.content_type == "text/plain"
        page = await answer.text()
    for name in ("num_requests_running", "num_requests_waiting", "prompt_tokens_total"):
        assert f'vllm:{name}{{engine="0",model_name="contract"}}' in page
    for name in ("generation_tokens_total", "e2e_request_latency_seconds_count"):
        assert f'vllm:{name}{{engine="0",model_name="contract"}}' in page
    assert 'vllm:request_success_total{engine="0",finished_reason="length"' in page
