"""Calls at the server that sample several siblings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from swarm_server.web.planned_engine import (
    BODY,
    AppCall,
    Plan,
    PlannedEngine,
    answers,
    answers_stream,
    answers_whole,
    dies,
    dies_before_the_stream,
    start_server,
)

from fakevllm_adapters.formats.chat import ChatAdapter
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.http.answer_parts import AnswerPart, PartDecoder, PartEncoder
from fakevllm_adapters.http.complete_choices import CHOICES_HEADER, SentChoice
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER
from fakevllm_adapters.protocol.separate_prompts import PROMPTS_HEADER
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER, EndGroupReply
from fakevllm_server.rollout.capture.answer_forms import AnswerForms
from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.rollout.capture.shared_call import CompleteChoice, EndedChoice, SharedCapture
from fakevllm_server.rollout.engine_client import MIN_THREAD_BYTES
from fakevllm_server.types.weight_versions import CallStamp
from fakevllm_server.web.server_state import ServerState

Json = dict[str, Any]

SIBLINGS = {SIBLING_HEADER: "g/1-2"}
TWO: Json = {"n": 2}


def events_of(index: int, ids: tuple[int, ...] = (7, 8)) -> list[bytes]:
    """Return the events of one choice, as vLLM streams them."""
    usage = {"prompt_tokens": 2, "completion_tokens": len(ids), "total_tokens": 2 + len(ids)}
    opening: Json = {"index": index, "delta": {"role": "assistant", "content": ""}}
    last: Json = {
        "index": index,
        "delta": {"content": f"hi {index}"},
        "logprobs": {"content": [{"token": "x", "logprob": -0.5} for _ in ids]},
        "finish_reason": "stop",
        "token_ids": list(ids),
    }
    return [
        encode({"id": "c", "choices": [opening], "usage": usage, "prompt_token_ids": [1, 2]}),
        encode({"id": "c", "choices": [last], "usage": usage}),
    ]


def streams(*events: bytes, dies_after: bool = False) -> Plan:
    async def plan(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in events:
            await answer.write(event)
            await asyncio.sleep(0.01)  # the server then reads one event at a time
        if dies_after:
            return await dies(request)
        return answer

    return plan


ERROR_EVENT = encode({"error": {"message": "no", "code": 500}})
BOTH = streams(*events_of(0), *events_of(1, (9,)), DONE)


PARTS = PartEncoder()


def part_of(index: int, ids: tuple[int, ...] = (7, 8)) -> bytes:
    """Return a choice that is sent when it is complete."""
    tokens: Json = {
        "token_ids": list(ids),
        "logprobs": [-0.5] * len(ids),
        "weight_versions": [{"version": 3, "start": 0, "end": len(ids)}],
        "allowed_tokens": None,
        "finish_reason": "stop",
    }
    return PARTS.part(SentChoice(index, tokens, b'{"answer":%d}' % index).to_part())


ERROR_PART = PARTS.part(SentChoice(0, {"error": {"message": "no", "code": 400}}, b"").to_part())


def sends_parts(*parts: bytes, dies_after: bool = False) -> Plan:
    async def plan(request: web.Request) -> web.StreamResponse:
        headers = {name.decode(): value.decode() for name, value in PARTS.headers}
        answer = web.StreamResponse(headers=headers | {PROMPTS_HEADER: "8"})
        await answer.prepare(request)
        await answer.write(bytes([1, 0, 0, 0, 2, 0, 0, 0]))
        for part in parts:
            await answer.write(part)
            await asyncio.sleep(0.01)  # the server then reads one part at a time
        if dies_after:
            return await dies(request)
        return answer

    return plan


@asynccontextmanager
async def running(
    folder: Path, *plans: Plan, is_bundled: bool = False, replica: str | None = None
) -> AsyncGenerator[tuple[ServerState, PlannedEngine]]:
    """Start a server whose engine has answered a whole and a streamed call with one choice."""
    all_plans = (answers_whole, answers_stream, *plans)
    endpoint: Json = {"is_bundled": is_bundled, "replica": replica}
    async with PlannedEngine(folder, *all_plans, **endpoint) as engine:
        state = await start_server(folder, engine)
        for streamed in (False, True):
            call = AppCall(state, {"stream": streamed}, headers={SIBLING_HEADER: "g/0"})
            assert (await call.answered()).status == 200
        engine.bodies.clear()
        try:
            yield state, engine
        finally:
            await state.close()


def parts_of(call: AppCall) -> list[AnswerPart]:
    assert call.status == 200
    return PartDecoder(call.headers[b"content-type"].decode()).feed(call.body)


def end_group(state: ServerState) -> EndGroupReply:
    return state.pool.end_group("g", [1.0, 0.0, 0.5], step=1)


async def test_each_choice_is_a_part_and_a_call_of_its_own_sibling(tmp_path: Path) -> None:
    async with running(tmp_path, BOTH) as (state, engine):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        first, second = parts_of(call)
        assert (first.index, second.index) == (1, 2)
        assert first.headers == [(b"content-type", b"application/json")]
        answer = orjson.loads(second.body)
        (choice,) = answer["choices"]
        assert (choice["index"], choice["message"]["content"]) == (0, "hi 1")
        assert (choice["logprobs"], choice["token_ids"]) == (None, None)
        assert answer["usage"] == {"completion_tokens": 1} and answer["prompt_token_ids"] is None
        (body,) = engine.bodies
        assert (body["n"], body["stream"]) == (2, True)
        reply = end_group(state)
        _, one, two = reply.calls
        assert [len(calls) for calls in (one, two)] == [1, 1]
        assert one[0].response_ids != two[0].response_ids
        assert one[0].prompt == two[0].prompt == 0 and len(reply.prompts) == 1
        assert one[0].weight_versions == [[3, 0, 2]] and two[0].untrainable is None


@pytest.mark.parametrize("replica", [None, "replica-1"])
async def test_each_captured_call_names_the_replica_that_sampled_it(
    tmp_path: Path, replica: str | None
) -> None:
    async with running(tmp_path, BOTH, replica=replica) as (state, _):
        parts_of(await AppCall(state, TWO, headers=SIBLINGS).answered())
        calls = [call for own in end_group(state).calls for call in own]
        assert [call.replica for call in calls] == [replica] * 4


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bundled_engine_is_asked_for_complete_choices(
    tmp_path: Path, streamed: bool
) -> None:
    both = sends_parts(part_of(1), part_of(0, (9,)), PARTS.end())
    async with running(tmp_path, both, is_bundled=True) as (state, engine):
        body = TWO | {"stream": streamed}
        call = await AppCall(state, body, headers=SIBLINGS).answered()
        second, first = parts_of(call)
        assert (second.index, second.body) == (2, b'{"answer":1}')
        assert (first.index, first.body) == (1, b'{"answer":0}')
        (content_type,) = (value for name, value in first.headers if name == b"content-type")
        assert content_type.startswith(b"text/event-stream" if streamed else b"application/json")
        assert engine.bodies == [BODY | body], "the engine gets the app's own fields"
        assert engine.headers[-1][CHOICES_HEADER.lower()] == "1"
        reply = end_group(state)
        _, (one,), (two,) = reply.calls
        assert one.response_ids != two.response_ids and one.prompt == two.prompt
        assert two.weight_versions == [[3, 0, 2]] and two.untrainable is None


@pytest.mark.parametrize(
    "rest",
    [
        sends_parts(part_of(1), part_of(0)[:-9], dies_after=True),
        sends_parts(part_of(1)),
        sends_parts(part_of(1), ERROR_PART, PARTS.end()),
        sends_parts(part_of(1) + b"--other\r\n\r\n"),
    ],
    ids=["dies", "stops", "error", "malformed"],
)
async def test_a_failure_fails_only_the_choices_that_were_not_sent(
    tmp_path: Path, rest: Plan
) -> None:
    async with running(tmp_path, rest, is_bundled=True) as (state, engine):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        (part,) = parts_of(call)
        assert part.index == 2 and call.is_ended and len(engine.bodies) == 1
        assert [len(calls) for calls in end_group(state).calls] == [2, 0, 1]


async def test_an_error_before_the_first_complete_choice_has_its_own_status(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, sends_parts(ERROR_PART), is_bundled=True) as (state, _):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        assert (call.status, call.json["error"]["message"]) == (400, "no")


async def test_a_bundled_engine_that_dies_before_the_first_choice_is_asked_again(
    tmp_path: Path,
) -> None:
    plans = (sends_parts(dies_after=True), sends_parts(part_of(0), part_of(1), PARTS.end()))
    async with running(tmp_path, *plans, is_bundled=True) as (state, engine):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        assert [part.index for part in parts_of(call)] == [1, 2] and len(engine.bodies) == 2


class WatchedCapture(SharedCapture):
    """A capture that remembers the threads in which answers were put together."""

    def __init__(self) -> None:
        body: Json = {"messages": [{"role": "user", "content": "hi"}]}
        forms = AnswerForms("1+fakevllm")
        super().__init__(ChatAdapter.path, body, 2, forms, lambda body: ChatCapture(body, {}))
        self.threads: list[int] = []

    def complete(self, ended: Sequence[EndedChoice]) -> list[CompleteChoice]:
        self.threads += [threading.get_ident()] * len(ended)
        return super().complete(ended)


@pytest.mark.parametrize("num_ids", [2, MIN_THREAD_BYTES // 20])
async def test_only_long_answers_are_put_together_in_a_worker_thread(
    tmp_path: Path, num_ids: int
) -> None:
    stream = [*events_of(0, (7,) * num_ids), *events_of(1, (8,) * num_ids), DONE]
    async with running(tmp_path, streams(b"".join(stream))) as (state, _):
        client, capture, sent = state.engine_client, WatchedCapture(), list[Any]()
        assert client is not None
        recorded: dict[int, list[int]] = {}

        async def send(message: Any) -> None:
            sent.append(message)

        async def save(choices: Sequence[CompleteChoice]) -> None:
            for choice in choices:
                call = choice.capture.record(CallStamp([1]))
                assert call is not None
                recorded[choice.index] = [*call.response_ids]

        await client.capture_siblings(ChatAdapter.path, capture, {}, 1, send, save)
        assert recorded == {0: [7] * num_ids, 1: [8] * num_ids}
        assert sent[-1]["body"].endswith(b"--\r\n")
        in_loop = [thread == threading.get_ident() for thread in capture.threads]
        assert in_loop == [num_ids == 2] * 2


async def test_a_streamed_sibling_gets_a_stream_of_its_own(tmp_path: Path) -> None:
    async with running(tmp_path, BOTH) as (state, _):
        call = await AppCall(state, TWO | {"stream": True}, headers=SIBLINGS).answered()
        for part in parts_of(call):
            assert part.headers == [(b"content-type", b"text/event-stream")]
            assert part.body.endswith(DONE) and b'"usage"' not in part.body
            assert part.body.count(b'"index":0') == part.body.count(b"data: {") == 2


async def test_an_engine_that_dies_before_a_choice_is_complete_is_asked_again(
    tmp_path: Path,
) -> None:
    broken = streams(events_of(0)[0], dies_after=True)
    for number, plan in enumerate((dies_before_the_stream, broken)):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with running(folder, plan, BOTH) as (state, engine):
            call = await AppCall(state, TWO, headers=SIBLINGS).answered()
            assert [part.index for part in parts_of(call)] == [1, 2] and len(engine.bodies) == 2
            assert [len(calls) for calls in end_group(state).calls] == [2, 1, 1]


@pytest.mark.parametrize(
    "rest",
    [
        streams(*events_of(1), events_of(0)[0], dies_after=True),
        streams(*events_of(1), events_of(0)[0]),
        streams(*events_of(1), ERROR_EVENT, DONE),
        streams(*events_of(1), b"data: {\n\n", DONE),
        streams(b"".join([*events_of(1), ERROR_EVENT, DONE])),
        streams(b"".join([*events_of(1), b"data: {\n\n", DONE])),
    ],
    ids=["dies", "stops", "error", "malformed", "error at once", "malformed at once"],
)
async def test_a_failure_fails_only_the_choices_that_were_not_complete(
    tmp_path: Path, rest: Plan
) -> None:
    async with running(tmp_path, rest) as (state, engine):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        (part,) = parts_of(call)
        assert part.index == 2 and call.is_ended and len(engine.bodies) == 1
        assert [len(calls) for calls in end_group(state).calls] == [2, 0, 1]


async def test_a_dying_engine_that_ends_the_stream_with_an_error_is_asked_again(
    tmp_path: Path,
) -> None:
    async def reports_its_death(request: web.Request) -> web.StreamResponse:
        engine.is_healthy = False
        return await streams(events_of(0)[0], ERROR_EVENT, DONE)(request)

    async with running(tmp_path, reports_its_death, BOTH) as (state, engine):
        call = AppCall(state, TWO, headers=SIBLINGS)
        async with asyncio.timeout(30):
            while not engine.bodies:
                await asyncio.sleep(0.01)
            while engine.num_health_checks < 2:
                await asyncio.sleep(0.01)
        engine.is_healthy = True
        await call.answered()
        assert [part.index for part in parts_of(call)] == [1, 2] and len(engine.bodies) == 2


async def test_an_error_event_before_the_first_answer_has_its_own_status(tmp_path: Path) -> None:
    error = {"error": {"message": "no", "type": "t", "param": None, "code": 400}}
    async with running(tmp_path, streams(encode(error), DONE)) as (state, _):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        assert (call.status, call.json) == (400, error)


async def test_a_refusal_of_the_engine_reaches_the_proxy(tmp_path: Path) -> None:
    refusal = answers(400, b'{"error": {"message": "no n"}}')
    async with running(tmp_path, refusal) as (state, engine):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        assert call.status == 400 and len(engine.bodies) == 1


async def test_a_busy_engine_is_reported_with_its_reason(tmp_path: Path) -> None:
    busy = answers(503, b'{"error": {"message": "busy"}}')
    async with running(tmp_path, busy) as (state, _):
        call = await AppCall(state, TWO, headers=SIBLINGS).answered()
        assert call.status == 503
        assert call.headers[REASON_HEADER.lower().encode()] == b"engine_busy"


@pytest.mark.parametrize(
    ("body", "headers", "path"),
    [
        ({"n": 3}, SIBLINGS, "/v1/chat/completions"),
        ({}, SIBLINGS, "/v1/chat/completions"),
        (TWO, {SIBLING_HEADER: "g/2-1"}, "/v1/chat/completions"),
        (TWO | {"input": "a"}, SIBLINGS, "/v1/responses"),
        (TWO | {"prompt": "a", "echo": True}, SIBLINGS, "/v1/completions"),
        (TWO | {"prompt": "a"}, SIBLINGS, "/v1/completions"),
        (TWO | {"stream": True, "stream_options": "x"}, SIBLINGS, "/v1/chat/completions"),
        (TWO | {"stream_options": {"include_usage": True}}, SIBLINGS, "/v1/chat/completions"),
    ],
    ids=["other n", "no n", "range", "format", "not captured", "form unknown", "options", "whole"],
)
async def test_a_call_that_cannot_be_shared_is_refused_without_asking_the_engine(
    tmp_path: Path, body: Json, headers: dict[str, str], path: str
) -> None:
    async with running(tmp_path) as (state, engine):
        call = await AppCall(state, body, headers=headers, path=path).answered()
        assert call.status == 400 and engine.bodies == []


async def test_a_proxy_that_disconnects_ends_the_call(tmp_path: Path) -> None:
    is_over = asyncio.Event()

    async def hangs(request: web.Request) -> web.StreamResponse:
        answer = await streams(*events_of(0))(request)
        await is_over.wait()
        return answer

    async with running(tmp_path, hangs) as (state, _):
        call = AppCall(state, TWO, headers=SIBLINGS)
        async with asyncio.timeout(30):
            while not call.body:
                await asyncio.sleep(0.01)
            call.disconnect.set()
            await call.answered()
        assert not call.is_ended
        assert [len(calls) for calls in end_group(state).calls] == [2, 1, 0]
        is_over.set()


async def test_a_clients_own_n_is_relayed_and_not_trained(tmp_path: Path) -> None:
    async with running(tmp_path, answers_whole) as (state, engine):
        call = await AppCall(state, TWO, headers={SIBLING_HEADER: "h/0"}).answered()
        assert call.status == 200 and call.headers[b"content-type"].startswith(b"application/json")
        assert engine.bodies[0]["n"] == 2 and not engine.bodies[0].get("stream")
        reply = state.pool.end_group("h", [1.0, 0.0], step=1)
        assert reply.failure_reason == "no_trainable_call: sampling_not_trainable: n"
