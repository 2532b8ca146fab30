"""What every rollout engine owes the server and its apps at /v1/completions and the small routes.

One engine a module; where engines differ by design, `contract.rollouts.ABILITIES` says so.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
import pytest_asyncio
from contract.rollouts import (
    CHAT,
    TRIES,
    Answer,
    Captured,
    Json,
    Rig,
    Sent,
    chunks_of,
    shape_of,
    started,
    user,
)

from fakevllm_server.rollout.capture.table import CAPTURES
from fakevllm_server.types.calls import RecordedCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = [
    "fake",
    "embedded",
    pytest.param("vllm", marks=[pytest.mark.real, pytest.mark.timeout(300)]),
]
PATH = "/v1/completions"
GREEDY: Json = {"temperature": 0}
TOKENS: Json = {"return_token_ids": True, "logprobs": 0}
USAGE: Json = {"stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Rig]:
    rig = await started(request.param, tmp_path_factory.mktemp(request.param))
    yield rig
    await rig.close()


def body(rig: Rig, asked: Json) -> Json:
    """What `asked` leaves open is filled in, what it sets to None left away."""
    shared: Json = {"model": rig.endpoint.model_name, "max_tokens": 8, "prompt": rig.can.question}
    return {name: value for name, value in (shared | asked).items() if value is not None}


async def ask(rig: Rig, asked: Json, path: str = PATH) -> Answer:
    asked = body(rig, asked) if path == PATH else asked
    async with rig.http.post(path, json=asked) as answer:
        return Answer(answer.status, await answer.json())


async def stream(rig: Rig, asked: Json) -> list[Json]:
    async with rig.http.post(PATH, json=body(rig, asked | {"stream": True})) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        return chunks_of(await answer.read())


async def captured(rig: Rig, asked: Json) -> Captured:
    """As the server does it: through the gate, recorded by the stamp."""
    sent = Sent()
    records: list[RecordedCall | None] = []
    endpoint = rig.endpoint

    async def finished() -> None:
        records.append(capture.record(stamp))

    async with endpoint.gate.call() as stamp:
        capture = CAPTURES[PATH](body(rig, asked), endpoint.default_sampling, endpoint.refusal)
        await rig.client.capture(
            PATH,
            capture,
            {"Content-Type": "application/json"},
            sent,
            finished,
        )
    return Captured(sent.status, sent.body, records[0] if records else None)


def text_of(chunks: list[Json]) -> str:
    return "".join(choice["text"] for choice in choices_of(chunks))


def choices_of(chunks: list[Json]) -> list[Json]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def grammar(chunks: list[Json]) -> list[Any]:
    """Shapes in their order, repeats once: how many tokens a chunk holds is chance, and whether
    the first is also the last."""
    return [shape for shape, _ in itertools.groupby(map(shape_of, chunks))]


ASKED: list[Json] = [{}, {"logprobs": 2}, {"return_token_ids": True}, TOKENS]


@pytest.mark.parametrize("asked", ASKED)
async def test_capture_leaves_no_trace_in_an_answer(rig: Rig, asked: Json) -> None:
    plain = await ask(rig, GREEDY | asked)
    shown = orjson.loads((await captured(rig, GREEDY | asked)).shown)
    assert shape_of(shown) == shape_of(plain.json)
    assert shown["choices"] == plain.json["choices"]


@pytest.mark.parametrize("usage", [{}, USAGE])
@pytest.mark.parametrize("asked", ASKED)
async def test_capture_leaves_no_trace_in_a_stream(rig: Rig, asked: Json, usage: Json) -> None:
    asked = GREEDY | {"max_tokens": 4} | asked | usage
    for tries_left in reversed(range(TRIES)):
        plain = await stream(rig, asked)
        shown = chunks_of((await captured(rig, asked | {"stream": True})).shown)
        assert text_of(shown) == text_of(plain)
        if grammar(shown) == grammar(plain):
            return
        assert tries_left and rig.name == "vllm", (grammar(shown), grammar(plain))


@pytest.mark.parametrize("streams", [False, True])
async def test_a_captured_call_is_whole(rig: Rig, streams: bool) -> None:
    await rig.rollout.load_weights(rig.folders[0], 7)
    record = (await captured(rig, {"seed": 3, "stream": streams})).record
    assert record.untrainable is None and record.temperature == 1.0
    assert record.logprobs is not None
    assert len(record.logprobs) == len(record.response_ids) > 0
    spans = [(span.version, span.start, span.end) for span in record.versions]
    assert spans == [(7, 0, len(record.response_ids))]
    asked = {"prompt": rig.can.question, "model": rig.endpoint.model_name}
    assert record.prompt_ids == (await ask(rig, asked, "/tokenize")).json["tokens"]


async def test_a_stream_says_the_same_as_the_whole_answer(rig: Rig) -> None:
    chunks = await stream(rig, GREEDY | TOKENS | USAGE)
    body = (await ask(rig, GREEDY | TOKENS)).json
    (whole,) = body["choices"]
    *spoken, last = chunks
    choices = choices_of(spoken)
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    ids = [id for choice in choices for id in choice["token_ids"]]
    assert ids == whole["token_ids"]
    told = [lp for choice in choices for lp in choice["logprobs"]["token_logprobs"]]
    assert told == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-3)
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any(choice["prompt_token_ids"] for choice in choices[1:])
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes[-1] == whole["finish_reason"] and not any(finishes[:-1])
    usage = {key: value for key, value in body["usage"].items() if value is not None}
    assert (last["choices"], last["usage"]) == ([], usage)


async def test_a_streams_usage_may_be_told_all_along(rig: Rig) -> None:
    options: Json = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(rig, GREEDY | {"stream_options": options, "ignore_eos": True})
    *counts, last = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last
    keys = ["prompt_tokens", "total_tokens", "completion_tokens"]
    assert all(list(chunk["usage"]) == keys for chunk in chunks)


async def test_the_likeliest_tokens_are_told_beside_the_one_sampled(rig: Rig) -> None:
    (choice,) = (await ask(rig, GREEDY | {"logprobs": 1, "max_tokens": 2})).json["choices"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert len({len(column) for column in logprobs.values()}) == 1
    for token, logprob, tops in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert tops[token] == logprob and 1 <= len(tops) <= 2
    assert logprobs["text_offset"][0] == 0


async def test_a_prompt_in_ids_is_the_same_as_in_text(rig: Rig) -> None:
    asked = {"prompt": rig.can.question, "model": rig.endpoint.model_name}
    ids = (await ask(rig, asked, "/tokenize")).json["tokens"]
    forms: list[Any] = [rig.can.question, [rig.can.question], ids, [ids]]
    answers = [await ask(rig, GREEDY | TOKENS | {"prompt": form}) for form in forms]
    shown = [answer.json["choices"][0] for answer in answers]
    assert [choice["prompt_token_ids"] for choice in shown] == [ids] * 4
    assert [choice["text"] for choice in shown] == [shown[0]["text"]] * 4


async def test_each_of_several_prompts_has_its_choices(rig: Rig) -> None:
    asked: Json = {"prompt": ["a b", "c"], "n": 2, "return_token_ids": True}
    body = (await ask(rig, asked)).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"] for choice in body["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert body["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    indices = {choice["index"] for choice in choices_of(await stream(rig, asked))}
    assert indices == {0, 1, 2, 3}


async def test_a_stop_string_cuts_the_text_and_not_the_ids(rig: Rig) -> None:
    question, stop, before = rig.can.stop
    asked = GREEDY | TOKENS | {"prompt": question, "stop": [stop], "max_tokens": 40}
    body = (await ask(rig, asked)).json
    (choice,) = body["choices"]
    if choice["finish_reason"] == "stop":
        assert stop not in choice["text"] and (not before or choice["text"] == before)
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    streamed = choices_of(await stream(rig, asked))
    assert "".join(piece["text"] for piece in streamed) == choice["text"]
    assert streamed[-1]["stop_reason"] == choice["stop_reason"]


async def test_an_echo_precedes_the_text(rig: Rig) -> None:
    (plain,) = (await ask(rig, GREEDY)).json["choices"]
    (echoed,) = (await ask(rig, GREEDY | {"echo": True})).json["choices"]
    assert echoed["text"] == rig.can.question + plain["text"]
    chunks = choices_of(await stream(rig, GREEDY | {"echo": True}))
    assert "".join(choice["text"] for choice in chunks) == echoed["text"]
    (alone,) = (await ask(rig, GREEDY | {"echo": True, "max_tokens": 0})).json["choices"]
    assert alone["text"] == rig.can.question


async def test_the_request_id_becomes_the_answers(rig: Rig) -> None:
    async with rig.http.post(PATH, json=body(rig, {}), headers={"X-Request-Id": "abc"}) as answer:
        assert (await answer.json())["id"] == "cmpl-abc"


@pytest.mark.parametrize(
    ("asked", "status", "kind"),
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
async def test_what_cannot_be_answered_is_refused_in_vllms_shape(
    rig: Rig, asked: Json, status: int, kind: str
) -> None:
    answer = await ask(rig, asked)
    assert answer.status == status
    error = answer.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == (kind, status)
    through = await captured(rig, asked)
    assert (through.status, through.call) == (status, None)
    assert orjson.loads(through.shown) == answer.json, "capture must not change what is refused"


async def test_a_conversation_is_tokenized_as_it_is_asked(rig: Rig) -> None:
    asked: Json = {"messages": user("hi"), "model": rig.endpoint.model_name}
    tokenized = (await ask(rig, asked | {"return_token_strs": True}, "/tokenize")).json
    assert list(tokenized) == ["count", "max_model_len", "tokens", "token_strs"]
    chat = (await ask(rig, asked | {"return_token_ids": True, "max_tokens": 1}, CHAT)).json
    assert tokenized["tokens"] == chat["prompt_token_ids"]
    assert len(tokenized["token_strs"]) == tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == rig.endpoint.max_model_len
    back: Json = {"tokens": tokenized["tokens"], "model": rig.endpoint.model_name}
    text = (await ask(rig, back, "/detokenize")).json
    assert list(text) == ["prompt"] and "hi" in text["prompt"]


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
async def test_the_small_routes_answer_alike(
    rig: Rig, method: str, path: str, status: int, body: bytes
) -> None:
    async with rig.http.request(method, path) as answer:
        assert (answer.status, await answer.read()) == (status, body)
        assert (answer.headers.get("allow") is not None) == (status == 405)


async def test_metrics_bear_the_names_an_autoscaler_reads(rig: Rig) -> None:
    await ask(rig, {})
    async with rig.http.get("/metrics") as answer:
        assert answer.status == 200 and answer.content_type == "text/plain"
        page = await answer.text()
    for name in ("num_requests_running", "num_requests_waiting", "prompt_tokens_total"):
        assert f'vllm:{name}{{engine="0",model_name="contract"}}' in page
    for name in ("generation_tokens_total", "e2e_request_latency_seconds_count"):
        assert f'vllm:{name}{{engine="0",model_name="contract"}}' in page
    assert 'vllm:request_success_total{engine="0",finished_reason="length"' in page
