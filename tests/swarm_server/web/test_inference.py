"""Model calls at the server while its engine is healthy, dies, is restarted, and serves again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from swarm_server.web.planned_engine import (
    BODY,
    AppCall,
    Plan,
    PlannedEngine,
    answers,
    answers_and_closes,
    answers_stream,
    answers_whole,
    connect_engine,
    dies,
    dies_before_the_stream,
    dies_in_stream,
    hangs_in_stream,
    start_server,
    stops_in_stream,
)

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.protocol.errors import internal_error
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER, EndGroupReply, EngineStatus
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.routes import inference
from fakevllm_server.web.server_state import ServerState

SIBLING = {SIBLING_HEADER: "g/0"}
REASON = REASON_HEADER.lower().encode()


@asynccontextmanager
async def running(
    folder: Path, *plans: Plan, **endpoint: Any
) -> AsyncGenerator[tuple[ServerState, PlannedEngine]]:
    async with PlannedEngine(folder, *plans, **endpoint) as engine:
        state = await start_server(folder, engine)
        try:
            yield state, engine
        finally:
            await state.close()


def end_group(state: ServerState) -> EndGroupReply:
    return state.pool.end_group("g", [1.0, 0.0], step=1)


def image_at(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}]}


def lose_engine(state: ServerState) -> None:
    state.engine.move(EngineStatus.BOOTING, 0.0, "it died")


async def test_a_call_before_the_first_boot_is_refused_at_once(tmp_path: Path) -> None:
    state = ServerState(ServerConfig("fake", tmp_path))
    state.engine.move(EngineStatus.BOOTING, 0.0)
    call = await AppCall(state).answered()
    assert call.status == 503 and "ENGINE.BOOTING" in call.json["error"]["message"]
    assert call.headers[REASON] == b"engine_not_ready"
    state.engine.move(EngineStatus.OFFLINE, 0.0)
    await state.close()


async def test_a_call_waits_until_a_dead_engine_is_restarted(tmp_path: Path) -> None:
    async with running(tmp_path) as (state, _):
        lose_engine(state)
        call = AppCall(state)
        async with PlannedEngine(tmp_path, answers_whole, name="next") as engine:
            await connect_engine(state, engine)
            assert (await call.answered()).status == 200
            assert len(engine.bodies) == 1


async def test_a_call_that_waited_too_long_gets_a_503_in_vllms_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "HOLD_S", 0.01)
    async with running(tmp_path) as (state, _):
        lose_engine(state)
        call = await AppCall(state).answered()
    assert call.status == 503 and call.headers[b"retry-after"] == b"2"
    assert call.json["error"]["type"] == "Service Unavailable"
    assert call.headers[REASON] == b"engine_failed"


async def test_a_client_that_disconnects_while_it_waits_ends_the_call(tmp_path: Path) -> None:
    async with running(tmp_path) as (state, engine):
        lose_engine(state)
        call = AppCall(state)
        call.disconnect.set()
        await call.answered()
        assert call.status is None and engine.bodies == []


async def test_waiting_calls_are_refused_when_the_engine_goes_offline(tmp_path: Path) -> None:
    async with running(tmp_path) as (state, _):
        lose_engine(state)
        call = AppCall(state)
        await asyncio.sleep(0)
        state.engine.move(EngineStatus.OFFLINE, 0.0, "no such model")
        assert (await call.answered()).status == 503
        assert "no such model" in call.json["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
async def test_a_request_for_the_model_list_waits_until_a_dead_engine_is_restarted(
    path: str, tmp_path: Path
) -> None:
    async with running(tmp_path) as (state, _):
        lose_engine(state)
        call = AppCall(state, method="GET", path=path)
        async with PlannedEngine(tmp_path, name="next") as engine:
            await connect_engine(state, engine)
            assert (await call.answered()).status == 200


@pytest.mark.parametrize("path", ["/metrics", "/load", "/ping"])
async def test_a_request_for_metrics_never_waits(path: str, tmp_path: Path) -> None:
    async with running(tmp_path) as (state, _):
        lose_engine(state)
        call = await AppCall(state, method="GET", path=path).answered()
    assert call.status == 503 and "it died" in call.json["error"]["message"]


@pytest.mark.parametrize(
    "failure",
    [dies, dies_before_the_stream],
    ids=["before the headers", "before the first event"],
)
async def test_a_call_that_fails_before_its_first_byte_is_sent_again_to_the_next_engine(
    tmp_path: Path, failure: Plan
) -> None:
    async with running(tmp_path, failure, failure) as (state, first):
        call = AppCall(state, headers=SIBLING)
        await first.got_request.wait()
        lose_engine(state)
        async with PlannedEngine(tmp_path, answers_whole, name="next") as second:
            await connect_engine(state, second)
            assert (await call.answered()).status == 200
        assert first.bodies[-1:] == second.bodies
        assert len(end_group(state).calls[0]) == 1


@pytest.mark.parametrize("answer", [b'{"error": {}}', b""])
async def test_an_error_of_a_dying_engine_does_not_reach_the_app(
    tmp_path: Path, answer: bytes
) -> None:
    async with running(tmp_path, answers(500, answer)) as (state, first):
        first.is_healthy = False
        call = AppCall(state)
        await first.got_request.wait()
        lose_engine(state)
        async with PlannedEngine(tmp_path, answers_whole, name="next") as second:
            await connect_engine(state, second)
            assert (await call.answered()).status == 200


async def test_an_error_of_a_healthy_engine_reaches_the_app_unchanged(tmp_path: Path) -> None:
    async with running(tmp_path, answers(500, b'{"error": {"message": "odd"}}')) as (state, engine):
        call = await AppCall(state, headers=SIBLING).answered()
        assert (call.status, call.body) == (500, b'{"error": {"message": "odd"}}')
        assert len(engine.bodies) == 1 and end_group(state).failure_reason == "unknown_group"


@pytest.mark.parametrize(
    ("status", "sent", "reason"),
    [
        (503, None, b"engine_busy"),
        (429, None, b"engine_busy"),
        (502, None, b"engine_failed"),
        (503, "engine_failed", b"engine_failed"),
        (503, "engine_on_fire", b"engine_busy"),
        (500, None, None),
        (400, None, None),
    ],
)
@pytest.mark.parametrize("headers", [{}, SIBLING])
async def test_an_engines_error_gets_the_reason_that_it_sends_or_its_status_implies(
    tmp_path: Path,
    headers: dict[str, str],
    status: int,
    sent: str | None,
    reason: bytes | None,
) -> None:
    plan = answers(status, b'{"error": {"message": "any"}}', sent)
    async with running(tmp_path, plan, plan) as (state, _):
        call = await AppCall(state, headers=headers).answered()
        assert (call.status, call.headers.get(REASON)) == (status, reason)


async def test_a_call_is_retried_at_once_if_a_healthy_engine_closed_the_connection(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, dies, answers_whole) as (state, engine):
        assert (await AppCall(state).answered()).status == 200
        assert len(engine.bodies) == 2


@pytest.mark.parametrize("status", [200, 500])
async def test_a_call_neither_fails_nor_waits_because_the_engine_closes_connections(
    tmp_path: Path, status: int
) -> None:
    """vLLM closes a connection without an announcement after an error 500. After several of them,
    each connection that is kept may be such a one."""
    num_before = 8
    plans = [*[answers_and_closes] * num_before, answers(status, orjson.dumps({"error": {}}))]
    async with running(tmp_path, *plans) as (state, engine):
        before = [AppCall(state) for _ in range(num_before)]
        assert [(await call.answered()).status for call in before] == [200] * num_before
        assert (await AppCall(state).answered()).status == status
        assert len(engine.bodies) == len(plans)
        assert engine.num_health_checks == int(status == 500), "the call waited for the engine"


async def test_a_second_failure_is_a_503_with_retry_after(tmp_path: Path) -> None:
    async with running(tmp_path, dies, dies, dies) as (state, _):
        call = await AppCall(state, headers=SIBLING).answered()
        assert call.status == 503 and call.headers[b"retry-after"] == b"2"
        assert call.json["error"]["type"] == "Service Unavailable"
        assert call.headers[REASON] == b"engine_failed"
        assert end_group(state).failure_reason == "unknown_group"


@pytest.mark.parametrize("plan", [dies_in_stream, stops_in_stream])
async def test_a_stream_cut_after_its_first_byte_ends_with_an_error_and_is_not_captured(
    tmp_path: Path, plan: Plan
) -> None:
    async with running(tmp_path, plan) as (state, engine):
        call = await AppCall(state, {"stream": True}, headers=SIBLING).answered()
        assert call.status == 200 and call.is_ended
        assert call.body.endswith(encode(internal_error().body) + DONE)
        assert len(engine.bodies) == 1 and end_group(state).failure_reason == "unknown_group"


async def test_the_stream_of_an_engine_that_hangs_ends_when_the_next_engine_is_connected(
    tmp_path: Path,
) -> None:
    is_over = asyncio.Event()
    async with running(tmp_path, hangs_in_stream(is_over)) as (state, _):
        call = AppCall(state, {"stream": True}, headers=SIBLING)
        async with asyncio.timeout(30):
            while not call.body:
                await asyncio.sleep(0.01)
        lose_engine(state)
        async with PlannedEngine(tmp_path, name="next") as second:
            await connect_engine(state, second)
            await call.answered()
        assert call.status == 200 and call.is_ended
        assert call.body.endswith(encode(internal_error().body) + DONE)
        is_over.set()


async def test_a_stream_is_captured_before_its_end_is_sent(tmp_path: Path) -> None:
    async with running(tmp_path, answers_stream) as (state, engine):
        call = await AppCall(state, {"stream": True}, headers=SIBLING).answered()
        (record,) = end_group(state).calls[0]
    assert record.untrainable is None and record.weight_versions == [[3, 0, 2]]
    assert call.body.endswith(DONE) and b"usage" not in call.body
    assert engine.bodies[0]["stream_options"]["include_usage"] is True


async def test_calls_wait_at_the_gate_for_new_weights(tmp_path: Path) -> None:
    async with running(tmp_path, answers_whole, answers_whole) as (state, engine):
        async with engine.endpoint.gate.change(4, bound_s=1):
            calls = [AppCall(state, headers=SIBLING), AppCall(state)]
            await asyncio.sleep(0.05)  # the calls must not reach the engine meanwhile
            assert engine.bodies == []
        for call in calls:
            assert (await call.answered()).status == 200
        (record,) = end_group(state).calls[0]
    assert record.weight_versions == [[4, 0, 2]]


async def test_a_call_that_waits_at_a_closed_gate_is_sent_to_the_next_engine(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (state, first):
        with pytest.raises(RuntimeError):
            async with first.endpoint.gate.change(4, bound_s=1):
                raise RuntimeError("the weights did not load")
        call = AppCall(state)
        await asyncio.sleep(0)
        lose_engine(state)
        async with PlannedEngine(tmp_path, answers_whole, name="next") as second:
            await connect_engine(state, second)
            assert (await call.answered()).status == 200
        assert first.bodies == []


async def test_an_engine_that_must_not_be_trained_on_serves_and_the_group_has_the_reason(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, answers_whole, answers_whole, refusal="logprobs are raw") as (
        state,
        _,
    ):
        for index in range(2):
            call = AppCall(state, headers={SIBLING_HEADER: f"g/{index}"})
            assert (await call.answered()).status == 200
        assert end_group(state).failure_reason == "no_trainable_call: logprobs are raw"


async def test_every_call_is_sent_with_the_engines_key_and_without_the_clients(
    tmp_path: Path,
) -> None:
    key = {"Authorization": "Bearer engine"}
    async with running(tmp_path, answers_whole, answers_whole, headers=key) as (state, engine):
        for headers in (SIBLING, {}):
            await AppCall(state, headers=headers | {"Authorization": "Bearer app"}).answered()
    assert [headers["authorization"] for headers in engine.headers] == ["Bearer engine"] * 2


@pytest.mark.parametrize("raw", [b"", b"{", b'{"choices": [{"logprobs": NaN}]}', b"[]", b"null"])
async def test_an_unreadable_answer_reaches_the_app_unchanged_and_is_not_trained(
    tmp_path: Path, raw: bytes
) -> None:
    async with running(tmp_path, answers(200, raw)) as (state, _):
        call = await AppCall(state, headers=SIBLING).answered()
        assert (call.status, call.body) == (200, raw)
        assert end_group(state).failure_reason == "no_trainable_call: unreadable_answer"


async def test_after_a_refusal_the_engine_gets_the_apps_own_body(tmp_path: Path) -> None:
    refusal = answers(400, b'{"error": {"message": "no"}}')
    async with running(tmp_path, refusal, refusal) as (state, engine):
        call = await AppCall(state, headers=SIBLING).answered()
        assert call.status == 400 and engine.bodies[1] == BODY
        assert end_group(state).failure_reason == "unknown_group"


async def test_an_engine_that_refuses_the_capture_serves_and_the_group_has_the_reason(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, answers(400, b"{}"), answers_whole) as (state, _):
        assert (await AppCall(state, headers=SIBLING).answered()).status == 200
        assert end_group(state).failure_reason == "no_trainable_call: capture_refused"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "BadRequestError"),
        ("/v1/messages", "invalid_request_error"),
        ("/tokenize", "BadRequestError"),
    ],
)
async def test_vllm_gets_no_media_url_of_a_host_that_is_not_allowed(
    tmp_path: Path, path: str, kind: str
) -> None:
    config = ServerConfig("vllm", tmp_path, media_domains=["images.example.com"])
    async with PlannedEngine(tmp_path, answers_whole) as engine:
        state = await start_server(tmp_path, engine, config)
        refused = await AppCall(state, image_at("http://10.0.0.1/a.png"), path=path).answered()
        assert refused.status == 400 and not engine.bodies
        error = refused.json["error"]
        assert error["type"] == kind and "--media-domain 10.0.0.1" in error["message"]
        allowed = image_at("https://images.example.com/a.png")
        assert (await AppCall(state, allowed, path=path).answered()).status == 200
        assert len(engine.bodies) == 1
        await state.close()


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/chat/completions", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "hi", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "hi", "echo": True, "logprobs": 0}, "echo"),
        ("/v1/chat/completions", {"messages": [], "echo": True}, "echo"),
        ("/v1/chat/completions", {"messages": [], "echo": False, "logprobs": True}, None),
        ("/v1/completions", {"messages": None, "prompt": "hi", "echo": True}, None),
        ("/v1/completions", {"prompt": "hi", "logprobs": 1}, None),
    ],
)
async def test_a_vllm_with_adapters_gets_no_request_for_logprobs_of_a_prompt(
    tmp_path: Path, path: str, fields: dict[str, Any], field: str | None
) -> None:
    async with running(tmp_path, answers_whole, takes_adapters=True) as (state, engine):
        answer = await AppCall(state, fields, path=path).answered()
        assert answer.status == (200 if field is None else 400)
        assert len(engine.bodies) == (field is None)
        assert field is None or answer.json["error"]["param"] == field
    async with running(tmp_path, answers_whole) as (state, engine):
        assert (await AppCall(state, fields, path=path).answered()).status == 200


async def test_a_body_that_only_vllm_can_parse_is_checked_for_logprobs_of_a_prompt(
    tmp_path: Path,
) -> None:
    body = b'{"temperature": NaN, "prompt": "hi", "prompt_logprobs": 1}'
    async with running(tmp_path, answers_whole, takes_adapters=True) as (state, engine):
        answer = await AppCall(state, body, path="/v1/completions").answered()
        assert answer.status == 400 and not engine.bodies
        assert answer.json["error"]["param"] == "prompt_logprobs"


async def test_a_call_of_the_served_weights_is_sent_to_their_adapter_and_shows_the_models_name(
    tmp_path: Path,
) -> None:
    def named(model: str) -> bytes:
        return orjson.dumps({"model": model, "choices": []})

    async with running(tmp_path, answers(200, named("policy-17"))) as (state, engine):
        assert state.engine_client is not None
        endpoint = state.engine_client.endpoint
        endpoint.gate.serve_adapter("policy-17", 17)
        call = await AppCall(state, {"model": endpoint.model_name}).answered()
        assert engine.bodies[0]["model"] == "policy-17"
        assert call.status == 200 and call.json["model"] == endpoint.model_name


@pytest.mark.parametrize("depth", [300, 2000, 100_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
async def test_a_deeply_nested_body_whose_media_urls_the_server_cannot_read_is_refused(
    tmp_path: Path, path: str, depth: int
) -> None:
    nested = b"[" * depth + b"]" * depth
    fields = orjson.dumps(image_at("http://10.0.0.1/a.png") | {"input": "hi"})
    async with PlannedEngine(tmp_path) as engine:
        state = await start_server(tmp_path, engine, ServerConfig("vllm", tmp_path))
        for raw in (b'{"x": %s, %s' % (nested, fields[1:]), b'{"messages": %s}' % nested):
            refused = await AppCall(state, raw, path=path).answered()
            assert refused.status == 400 and not engine.bodies
            assert "nested deeper than 250 levels" in refused.json["error"]["message"]
        await state.close()


async def test_a_call_that_is_captured_for_training_must_not_name_a_policy(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, answers_whole) as (state, _):
        refused = await AppCall(state, {"model": "policy-3"}, headers=SIBLING).answered()
        assert refused.status == 404
        assert "`policy-3` does not exist" in refused.json["error"]["message"]
        assert not any(state.pool.waiting.values())
        call = await AppCall(state, {"model": "policy-3"}).answered()
        assert call.status == 200


async def test_a_rejected_version_answers_no_call_although_the_engine_holds_it(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, answers_whole) as (state, engine):
        state.run.releases.state.rejected.add(3)
        num_calls = len(engine.bodies)
        refused = await AppCall(state, {"model": "policy-3"}).answered()
        assert refused.status == 404 and len(engine.bodies) == num_calls
        assert "`policy-3` does not exist" in refused.json["error"]["message"]
        assert (await AppCall(state, {"model": "policy-2"}).answered()).status == 200
