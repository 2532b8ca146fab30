from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from fakevllm_adapters.formats.sse import DONE, SseDecoder, parse_event
from fakevllm_adapters.http.answer_parts import PartDecoder
from fakevllm_adapters.http.complete_choices import CHOICES_HEADER, SentChoice
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER, OutageReason
from fakevllm_adapters.protocol.separate_prompts import ASKED, PROMPTS_HEADER, parse_sizes
from fakevllm_server.backends.fake.byte_tokens import EOS
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.engine_server import create_app
from fakevllm_server.backends.http.preparation import PreparationThreads
from fakevllm_server.types.number_arrays import ids_from_bytes
from fakevllm_server.types.sampling import Sampling, Token

Json = dict[str, Any]

CHAT_BODY: Json = {"messages": [{"role": "user", "content": "hi"}]}
LONG_MESSAGE: Json = {"role": "user", "content": "a" * 200_000}


def client_for(engine: FakeEngine | None) -> httpx.AsyncClient:
    app = create_app(engine, FakeEngine(), PreparationThreads())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine")


@pytest_asyncio.fixture
async def http() -> AsyncGenerator[httpx.AsyncClient]:
    async with client_for(FakeEngine()) as client:
        yield client


async def read_metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the values of the model's metrics by name. Where a metric has a finish reason, the key
    is the name, a space and the reason."""
    page = (await http.get("/metrics")).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.get("model_name") == "fake" and "le" not in sample.labels:
                assert sample.labels["engine"] == "0"
                reason = sample.labels.get("finished_reason")
                values[f"{sample.name} {reason}" if reason else sample.name] = sample.value
    return values


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", b""),
        ("GET", "/ping", b""),
        ("POST", "/ping", b""),
        ("GET", "/load", b'{"server_load":0}'),
        ("GET", "/version", b'{"version":"0.33.0+fakevllm"}'),
    ],
)
async def test_the_small_routes_answer_as_vllm_does(
    http: httpx.AsyncClient, method: str, path: str, body: bytes
) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.content) == (200, body)
    assert answer.headers.get("content-type") == ("application/json" if body else None)


async def test_the_model_is_listed_as_vllm_lists_it(http: httpx.AsyncClient) -> None:
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert list(card) == [
        *("id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"),
    ]
    assert (card["id"], card["max_model_len"]) == ("fake", 131072)


@pytest.mark.parametrize("path", ["/", "/v1/models/fake", "/nothing", "/v1/embeddings"])
async def test_an_unknown_path_is_refused_in_vllms_words(
    http: httpx.AsyncClient, path: str
) -> None:
    answer = await http.get(path)
    assert (answer.status_code, answer.content) == (404, b'{"detail":"Not Found"}')
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/tokenize", "POST"),
        ("HEAD", "/health", "GET"),
        ("HEAD", "/v1/models", "GET"),
        ("POST", "/version", "GET"),
    ],
)
async def test_a_refused_method_is_answered_with_the_allowed_one(
    http: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.headers["content-type"] == "application/json"
    assert method == "HEAD" or answer.content == b'{"detail":"Method Not Allowed"}'


async def test_a_process_that_only_trains_is_healthy_and_serves_no_model() -> None:
    async with client_for(None) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 404
        assert (await http.get("/control/info")).json()["model_name"] == ""


async def test_completions_are_answered_and_streamed(http: httpx.AsyncClient) -> None:
    body: Json = {"prompt": "[[say Hi]]"}
    answer = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc"})
    assert (answer.json()["id"], answer.json()["choices"][0]["text"]) == ("cmpl-abc", "Hi")
    streamed = await http.post("/v1/completions", json=body | {"stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last = SseDecoder().feed(streamed.content)
    texts = [(parse_event(event) or {})["choices"][0]["text"] for event in events]
    assert (texts, last) == (["H", "i", ""], DONE)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
async def test_a_body_that_is_not_json_is_refused_in_vllms_words(
    http: httpx.AsyncClient, path: str
) -> None:
    broken = await http.post(path, content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400 and "json_invalid" in broken.json()["error"]["message"]
    text = await http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 400
    assert "Only 'application/json' is allowed" in text.json()["error"]["message"]


async def test_a_text_is_tokenized_and_detokenized(http: httpx.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True})
    assert answer.content == (
        b'{"count":2,"max_model_len":131072,"tokens":[72,105],"token_strs":["H","i"]}'
    )
    back = await http.post("/detokenize", json={"tokens": [72, 105, EOS]})
    assert back.content == b'{"prompt":"Hi<|end|>"}'


async def test_a_conversation_is_tokenized_as_chat_renders_it(http: httpx.AsyncClient) -> None:
    messages: list[Json] = [{"role": "user", "content": "hi"}]
    body: Json = {"messages": messages, "chat_template_kwargs": {"a": 1}}
    tokenized = (await http.post("/tokenize", json=body)).json()
    chat: Json = {"messages": messages, "return_token_ids": True}
    ids = (await http.post("/v1/chat/completions", json=chat)).json()["prompt_token_ids"]
    assert tokenized["tokens"] == ids and tokenized["count"] == len(ids)
    assert tokenized["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "body.prompt"),
        ("/tokenize", {"prompt": "a", "model": "zz"}, 404, "does not exist"),
        ("/tokenize", {"messages": []}, 400, "empty conversation"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "x"}, 400, "untrusted"),
        (
            "/tokenize",
            {"messages": [], "continue_final_message": True, "add_generation_prompt": True},
            400,
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
        ("/detokenize", {}, 400, "body.tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "greater_than_equal"),
        ("/detokenize", {"tokens": [1], "model": "zz"}, 404, "does not exist"),
    ],
)
async def test_an_invalid_tokenization_request_is_refused_in_vllms_shape(
    http: httpx.AsyncClient, path: str, body: Json, status: int, message: str
) -> None:
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert message in error["message"]


async def test_metrics_have_vllms_names_before_the_first_request(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    metrics = await read_metrics(http)
    for name in (
        *("vllm:num_requests_running", "vllm:num_requests_waiting"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        *("vllm:request_success_total stop", "vllm:request_success_total length"),
        *("vllm:e2e_request_latency_seconds_count", "vllm:time_to_first_token_seconds_count"),
    ):
        assert metrics[name] == 0


async def test_metrics_count_requests_and_tokens(http: httpx.AsyncClient) -> None:
    for extra in ({}, {"max_tokens": 1}, {"stop": "i"}, {"stream": True}):
        await http.post("/v1/completions", json={"prompt": "[[say Hi]]"} | extra)
    metrics = await read_metrics(http)
    assert metrics["vllm:prompt_tokens_total"] == 40
    assert metrics["vllm:generation_tokens_total"] == 3 + 1 + 2 + 3
    assert metrics["vllm:request_success_total stop"] == 3
    assert metrics["vllm:request_success_total length"] == 1
    assert metrics["vllm:e2e_request_latency_seconds_count"] == 4
    assert metrics["vllm:num_requests_running"] == 0


async def test_a_request_is_counted_as_running_while_it_is_sampled() -> None:
    engine = MetricsReadingEngine()
    async with client_for(engine) as http:
        engine.http = http
        await http.post("/v1/chat/completions", json={"messages": [{"role": "user"}]})
    assert engine.metrics["vllm:num_requests_running"] == 1


class MetricsReadingEngine(FakeEngine):
    """An engine that reads the metrics page while it samples."""

    http: httpx.AsyncClient
    metrics: dict[str, float]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        self.metrics = await read_metrics(self.http)
        async for tokens in super().generate(prompt_ids, sampling):
            yield tokens


async def test_an_engine_that_cannot_report_allowed_token_sets_leaves_them_out(
    http: httpx.AsyncClient,
) -> None:
    assert (await http.get("/control/info")).json()["reports_allowed"] is False
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Yes or no?"}]}),
        ("/v1/completions", {"prompt": "Yes or no?"}),
    ):
        answer = await http.post(path, json=body | {"top_p": 0.5, "return_allowed_tokens": True})
        assert answer.status_code == 200 and b"allowed" not in answer.content


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT_BODY), ("/v1/completions", {"prompt": "hi"})]
)
async def test_the_prompts_ids_precede_the_answer_if_the_client_asks_for_them(
    http: httpx.AsyncClient, path: str, body: Json, streams: bool
) -> None:
    body = body | {"stream": streams, "return_token_ids": True, "n": 2}
    decimal = await http.post(path, json=body)
    apart = await http.post(path, json=body, headers={PROMPTS_HEADER: ASKED})
    (size,) = parse_sizes(apart.headers[PROMPTS_HEADER])
    ids = ids_from_bytes(apart.content[:size])
    assert len(ids) > 0
    text = b'"prompt_token_ids":' + orjson.dumps(ids.tolist())
    assert PROMPTS_HEADER not in decimal.headers and text in decimal.content
    assert text not in apart.content[size:] and b'"prompt_token_ids":null' in apart.content[size:]
    assert b'"token_ids":[' in apart.content[size:]


async def test_the_ids_of_several_prompts_stay_in_the_answer(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["hi", "ho"], "return_token_ids": True}
    answer = await http.post("/v1/completions", json=body, headers={PROMPTS_HEADER: ASKED})
    assert PROMPTS_HEADER not in answer.headers
    assert [choice["prompt_token_ids"] for choice in answer.json()["choices"]] == [
        list(b"hi"),
        list(b"ho"),
    ]


class StaggeredEngine(FakeEngine):
    """An engine that answers a request with seed 7 only after another request, and refuses requests
    with seed 9."""

    def __init__(self) -> None:
        super().__init__()
        self.has_answered = asyncio.Event()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        if sampling.seed == 9:
            raise unavailable("Any sentence.", OutageReason.ENGINE_BUSY)
        if sampling.seed == 7:
            await self.has_answered.wait()
        async for tokens in super().generate(prompt_ids, sampling):
            yield tokens
        self.has_answered.set()


def sent_choices(response: httpx.Response) -> list[SentChoice]:
    (size,) = parse_sizes(response.headers[PROMPTS_HEADER])
    assert ids_from_bytes(response.content[:size])
    decoder = PartDecoder(response.headers["content-type"])
    return [SentChoice.from_part(part) for part in decoder.feed(response.content[size:])]


COMPLETE_CHOICES = {PROMPTS_HEADER: ASKED, CHOICES_HEADER: ASKED}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT_BODY), ("/v1/completions", {"prompt": "hi"})]
)
async def test_each_choice_is_sent_when_it_is_complete_if_the_client_asks_for_it(
    path: str, body: Json, streams: bool
) -> None:
    body = body | {"stream": streams, "max_tokens": 3}
    async with client_for(StaggeredEngine()) as http:
        response = await http.post(path, json=body | {"n": 2, "seed": 7}, headers=COMPLETE_CHOICES)
        choices = sent_choices(response)
        own = await http.post(path, json=body | {"seed": 8})
    assert [choice.index for choice in choices] == [1, 0]
    assert choices[0].answer.count(b'"index":0') == own.content.count(b'"index":0')
    assert own.content.endswith(DONE) == choices[0].answer.endswith(DONE) == streams
    assert len(choices[0].tokens["token_ids"]) == len(choices[0].tokens["logprobs"]) == 3


async def test_an_error_of_one_choice_is_sent_after_the_others_are_complete() -> None:
    body = CHAT_BODY | {"n": 3, "seed": 7}
    async with client_for(StaggeredEngine()) as http:
        response = await http.post("/v1/chat/completions", json=body, headers=COMPLETE_CHOICES)
    *complete, error = sent_choices(response)
    assert [choice.index for choice in complete] == [1, 0]
    assert error.tokens["error"]["message"] == "Any sentence."


class BusyEngine(FakeEngine):
    """An engine that refuses each request for lack of capacity."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        raise unavailable("Any sentence.", OutageReason.ENGINE_BUSY)
        yield []


async def test_an_engines_refusal_has_its_reason_in_a_header() -> None:
    async with client_for(BusyEngine()) as http:
        refused = await http.post("/v1/completions", json={"prompt": "hi"})
        good = await http.get("/version")
    assert (refused.status_code, refused.headers[REASON_HEADER]) == (503, "engine_busy")
    assert REASON_HEADER not in good.headers


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"stop_token_ids": [1] * 1025}, "`stop_token_ids`"),
        ("/v1/chat/completions", {"bad_words": ["a"] * 4097}, "`bad_words`"),
        ("/v1/chat/completions", {"allowed_token_ids": [1] * (2**20 + 1)}, "`allowed_token_ids`"),
        ("/v1/completions", {"prompt": [1] * (2**21 + 1)}, "`prompt`"),
        ("/v1/completions", {"prompt": [[1] * 2**20] * 3}, "`prompt`"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1025}, "`stop_token_ids`"),
        ("/detokenize", {"tokens": [1] * (2**21 + 1)}, "`tokens`"),
        ("/v1/chat/completions", {"messages": [LONG_MESSAGE]}, "maximum context length"),
        ("/v1/completions", {"prompt": "a" * 200_000}, "maximum context length"),
        ("/tokenize", {"prompt": "a" * (2**20 + 1)}, "at most 1048576 bytes"),
        ("/tokenize", {"messages": [LONG_MESSAGE]}, "maximum context length"),
    ],
)
async def test_a_request_that_takes_too_much_work_is_refused(
    http: httpx.AsyncClient, path: str, body: Json, message: str
) -> None:
    filled = body if "completions" not in path or "prompt" in body else CHAT_BODY | body
    answer = await http.post(path, json=filled)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_apps_may_count_the_tokens_of_a_text_that_is_larger_than_the_context(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post("/tokenize", json={"prompt": "a" * 200_000})
    assert answer.json()["count"] == 200_000


async def test_a_prompt_that_is_too_large_is_truncated_if_the_request_asks_for_it(
    http: httpx.AsyncClient,
) -> None:
    body: Json = {"prompt": "a" * 200_000 + "bc", "truncate_prompt_tokens": 3}
    answer = await http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.json()["choices"][0]["prompt_token_ids"] == [*b"abc"]
