"""Calls constrained to a part of the vocabulary: sampled over HTTP, captured, planned and
trained."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from swarm_server.backends.embedded.engine_helpers import EngineMaker, pieces

from fakevllm_adapters.formats.sse import SseDecoder
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.backends.http.engine_server import create_app
from fakevllm_server.backends.http.preparation import PreparationThreads
from fakevllm_server.rollout.capture.capture_registry import CAPTURES
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.backend import Batch, LossSpec, StepMetrics
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.types.token_masks import TokenMasks
from fakevllm_server.types.weight_versions import CallStamp

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PARAMETERS: Json = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Bonn"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Json = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS}}
CUTS: dict[str, Json] = {
    "a JSON schema": {"response_format": SCHEMA},
    "a choice": {"structured_outputs": {"choice": ["yes", "no", "now"]}},
    "a regular expression": {"structured_outputs": {"regex": "[a-f]{6}[0-9]"}},
    "a forced tool": {"tools": [TOOL], "tool_choice": "required"},
    "top-p": {"top_p": 0.9},
    "top-k and min-p at a temperature": {"top_k": 5, "min_p": 0.05, "temperature": 0.7},
    "top-p under a grammar": {"response_format": SCHEMA, "top_p": 0.8, "temperature": 1.5},
    "bad words and a least length": {"bad_words": ["The"], "min_tokens": 6},
    "allowed ids": {"allowed_token_ids": [2, *range(60, 90)]},
}


class Client:
    """A client that requests completions as the server does."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        transport = httpx.ASGITransport(app=create_app(engine, engine, PreparationThreads()))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None)
        self.reports_allowed = False

    async def __aenter__(self) -> Client:
        self.reports_allowed = (await self._http.get("/control/info")).json()["reports_allowed"]
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._http.aclose()

    async def call(self, path: str = CHAT, **fields: Any) -> RecordedCall:
        body: Json = {"max_tokens": 60} | fields
        if path == CHAT:
            body |= {"messages": [{"role": "user", "content": "How is it?"}]}
        else:
            body |= {"prompt": "How is it?"}
        capture = CAPTURES[path](body, {}, reports_allowed=self.reports_allowed)
        answer = await self._http.post(path, json=capture.upstream_body())
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            reply = b"".join(map(capture.event, SseDecoder().feed(answer.content)))
        else:
            reply = capture.answer(answer.content)
        assert b"allowed" not in reply
        record = capture.record(CallStamp([0]))
        assert record is not None
        return record


def planned(calls: Sequence[RecordedCall], rewards: Sequence[float], job: TrainJob) -> Batch:
    episodes = [
        ScoredEpisode(index, reward, [call])
        for index, (call, reward) in enumerate(zip(calls, rewards, strict=True))
    ]
    return plan_step(1, [FinishedGroup("g", episodes)], job).batch


async def trained(engine: EmbeddedEngine, calls: Sequence[RecordedCall]) -> StepMetrics:
    """Train one step on the calls, with alternating rewards."""
    job = TrainJob(entropy_coeff=0.01)
    await engine.boot(job)
    batch = planned(calls, [float(index % 2) for index in range(len(calls))], job)
    return await engine.step(batch, LossSpec.of(job))


def mismatches(call: RecordedCall, trainers: Sequence[float]) -> list[float]:
    """Return |trainer - engine| for each trained token's log-probability."""
    assert call.logprobs is not None
    forced = call.allowed.is_forced if call.allowed is not None else [False] * len(call.logprobs)
    engines = [one for one, is_forced in zip(call.logprobs, forced, strict=True) if not is_forced]
    return [abs(one - other) for one, other in zip(trainers, engines, strict=True)]


@pytest.mark.parametrize("fields", CUTS.values(), ids=CUTS)
async def test_the_trainer_computes_the_sampled_log_probs_of_a_constrained_call(
    make_engine: EngineMaker, fields: Json
) -> None:
    engine = make_engine(DEMO_MODEL_DIR, seed=3)
    job = TrainJob()
    await engine.boot(job)
    async with Client(engine) as client:
        calls = await asyncio.gather(*(client.call(**fields, seed=seed) for seed in range(4)))
        calls.append(await client.call(**fields, seed=4, stream=True))
    assert [call.untrainable for call in calls] == [None] * 5
    worse, better = ([list(call.response_ids) for call in calls[at:4:2]] for at in (0, 1))
    # Equal completions on both sides would cancel each other, and the gradient would be zero.
    assert sorted(worse) != sorted(better)
    batch = planned(calls, [0.0, 1.0] * 2 + [0.5], job)
    rows = await engine.log_probs(batch.calls, "trained")
    apart = [one for call, own in zip(calls, rows, strict=True) for one in mismatches(call, own)]
    assert sum(call.num_trained for call in calls) == len(apart) > 0
    assert max(apart) < 1e-4
    metrics = await engine.step(batch, LossSpec.of(job))
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    assert metrics["mismatch"] < 1e-4 and metrics["tokens"] == len(apart)


async def test_a_completion_reports_the_allowed_set_of_each_token(
    make_engine: EngineMaker,
) -> None:
    engine = make_engine()
    async with Client(engine) as client:
        calls = [
            await client.call(TEXT, structured_outputs={"regex": "[a-c]{4}"}, stream=stream)
            for stream in (False, True)
        ]
    for call in calls:
        assert call.untrainable is None and call.num_trained >= 1
    assert (await trained(engine, calls))["mismatch"] < 1e-4


async def test_logprobs_are_those_of_the_masked_and_renormalised_distribution(
    make_engine: EngineMaker,
) -> None:
    """The reported top tokens are all tokens that may follow, so their probabilities sum to 1."""
    engine = make_engine()
    transport = httpx.ASGITransport(app=create_app(engine, engine, PreparationThreads()))
    body: Json = {
        "messages": [{"role": "user", "content": "How is it?"}],
        "structured_outputs": {"choice": ["yes", "no", "now"]},
        "temperature": 1.7,
        "logprobs": True,
        "top_logprobs": 20,
        "return_token_ids": True,
        "return_allowed_tokens": True,
    }
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        choice = (await http.post(CHAT, json=body)).json()["choices"][0]
    sizes = [
        sum(entry["logprob"] > -9000 for entry in token["top_logprobs"])
        for token in choice["logprobs"]["content"]
    ]
    for token in choice["logprobs"]["content"]:
        masses = [math.exp(entry["logprob"]) for entry in token["top_logprobs"]]
        assert sum(masses) == pytest.approx(1, abs=1e-5)
    allowed = TokenMasks.from_engine_answer(choice["allowed_tokens"], choice["token_ids"])
    assert allowed is not None
    assert [allowed.sizes[index] for index in allowed.set_indices] == sizes


@pytest.mark.parametrize("fields", [{}, {"return_allowed_tokens": "yes"}])
async def test_allowed_sets_are_reported_only_on_request(
    make_engine: EngineMaker, fields: Json
) -> None:
    engine = make_engine()
    transport = httpx.ASGITransport(app=create_app(engine, engine, PreparationThreads()))
    body: Json = {"structured_outputs": {"choice": ["yes", "no"]}, "top_p": 0.9} | fields
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        for stream in (False, True):
            chat = {"messages": [{"role": "user", "content": "How is it?"}], "stream": stream}
            response = await http.post(CHAT, json=body | chat)
            assert response.status_code == 200 and b"allowed" not in response.content
            response = await http.post(TEXT, json=body | {"prompt": "How is it?", "stream": stream})
            assert response.status_code == 200 and b"allowed" not in response.content


async def test_forced_tokens_are_in_no_loss_and_no_denominator(
    make_engine: EngineMaker,
) -> None:
    """Most tokens of "yes" and "no no no no" are forced by the tokens before them."""
    engine = make_engine()
    fields: Json = {"structured_outputs": {"choice": ["yes", "no no no no"]}}
    async with Client(engine) as client:
        calls = [await client.call(**fields, seed=seed) for seed in range(12)]
    assert {call.response_ids[0] for call in calls} != {calls[0].response_ids[0]}
    for call in calls:
        assert call.allowed is not None and call.logprobs is not None
        assert call.num_trained < len(call.response_ids)
        certain = [
            logprob
            for logprob, is_forced in zip(call.logprobs, call.allowed.is_forced, strict=True)
            if is_forced
        ]
        assert set(certain) == {0.0}
    num_trained = sum(call.num_trained for call in calls)
    (piece,) = pieces(list(planned(calls, range(12), TrainJob()).calls), 10_000).pieces
    assert piece.tokens.scale.tolist() == pytest.approx([1 / num_trained] * num_trained)
    assert 0.0 not in piece.tokens.sampled_log_prob.tolist()
    assert (await trained(engine, calls))["tokens"] == num_trained


async def test_calls_with_and_without_a_grammar_train_together(make_engine: EngineMaker) -> None:
    engine = make_engine(DEMO_MODEL_DIR)
    async with Client(engine) as client:
        calls = await asyncio.gather(*(client.call(**fields) for fields in [{}, *CUTS.values()]))
    assert calls[0].allowed is None
    metrics = await trained(engine, calls)
    assert metrics["rho"] > 1.2  # they share their prompt
    assert metrics["mismatch"] < 1e-4 and metrics["grad_norm"] > 0


async def test_greedy_and_plain_calls_have_no_allowed_sets(
    make_engine: EngineMaker,
) -> None:
    engine = make_engine()
    async with Client(engine) as client:
        plain = await client.call(temperature=0.8, max_tokens=4)
        greedy = await client.call(temperature=0, top_p=0.5, max_tokens=4)
    assert plain.allowed is None and greedy.allowed is None


async def test_an_enum_under_a_grammar_is_learnt(make_engine: EngineMaker) -> None:
    """One of two values of a JSON schema is rewarded."""
    engine = make_engine(DEMO_MODEL_DIR, seed=1)
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    held = {"json": schema, "disable_any_whitespace": True}
    job = TrainJob(lr=1e-3)
    await engine.boot(job)
    shares: list[float] = []
    async with Client(engine) as client:
        for step in range(1, 11):
            calls = await asyncio.gather(
                *(client.call(structured_outputs=held, seed=100 * step + at) for at in range(16))
            )
            texts = [engine.decode(list(call.response_ids)) for call in calls]
            rewards = [float('"good"' in text) for text in texts]
            shares.append(sum(rewards) / len(rewards))
            await engine.step(planned(calls, rewards, job), LossSpec.of(job))
            await engine.publish(step)
    assert shares[0] < 0.7 and sum(shares[-4:]) / 4 > 0.85, shares
