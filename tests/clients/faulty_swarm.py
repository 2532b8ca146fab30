"""A swarm server whose model server fails as real ones do. Runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from fakevllm_adapters.errors import error_body
from fakevllm_adapters.sse import DONE, encode
from fakevllm_adapters.swarm import EngineStatus, EngineStatusReply, LogReply

Json = dict[str, Any]

TEXT = "All is well."
START_TIMEOUT_S = 30.0
ROLLING = EngineStatusReply(
    engine_status=EngineStatus.ROLLING,
    server_id="s",
    run_id="r",
    model="fake",
    global_step=1,
    max_model_len=4096,
    engine_version="0.27.1",
)
ENGINE_DIED: Json = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


class FaultySwarm:
    """The first `failing` calls fail as `fault` says, the others are answered."""

    def __init__(self) -> None:
        self.url = ""
        self.reset("none")

    def reset(self, fault: str, failing: int = 1_000_000) -> None:
        self.fault = fault
        self.failing = failing
        self.num_calls = 0

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(START_TIMEOUT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(START_TIMEOUT_S)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(ready))
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._ended = asyncio.Event()
        app = web.Application()
        app.router.add_get("/get_engine_status", _told(ROLLING.model_dump(mode="json")))
        app.router.add_get("/get_train_config", _told({}))
        app.router.add_get("/get_run_log", _told(LogReply(entries=[]).model_dump(mode="json")))
        app.router.add_post("/v1/chat/completions", self._chat)
        for path in ("/v1/responses", "/v1/messages"):
            app.router.add_post(path, self._native)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        ready.set()
        await self._ended.wait()
        await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.num_calls += 1
        failing = self.num_calls <= self.failing
        return await FAULTS[self.fault if failing else "none"](request, bool(body.get("stream")))

    async def _native(self, request: web.Request) -> web.StreamResponse:
        """The engine's own words for what it refuses in translation."""
        return await FAULTS[self.fault if self.fault.isdigit() else "404"](request, False)


Fault = Callable[[web.Request, bool], Awaitable[web.StreamResponse]]


def _told(body: Json) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


def _chunk(delta: Json, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return encode(_named("chat.completion.chunk", [choice]))


def _named(kind: str, choices: Sequence[Json], **more: Any) -> Json:
    named = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "fake"}
    return {**named, "choices": choices, **more}


USAGE = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
ROLE = _chunk({"role": "assistant", "content": ""})
HALF, OTHER_HALF = _chunk({"content": TEXT[:6]}), _chunk({"content": TEXT[6:]})
STOP = _chunk({}, "stop")
COUNTED = encode(_named("chat.completion.chunk", [], usage=USAGE))
WHOLE = [ROLE, HALF, OTHER_HALF, STOP, COUNTED, DONE]


def _whole() -> Json:
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return _named("chat.completion", [choice], usage=USAGE)


async def _stream(
    request: web.Request, events: Sequence[bytes], *, pause_s: float = 0.0, drops: bool = False
) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for event in events:
        await asyncio.sleep(pause_s)
        await answer.write(event)
    if drops:
        _drop(request)
    return answer


def _drop(request: web.Request) -> None:
    """The connection is gone, as with a process that was killed."""
    if request.transport is not None:
        request.transport.abort()


def _streams(*events: bytes, drops: bool = False, pause_s: float = 0.0) -> Fault:
    """What a streaming caller gets. Others get half an answer, or none, where it has no end."""

    async def fault(request: web.Request, streamed: bool) -> web.StreamResponse:
        if streamed:
            return await _stream(request, events, drops=drops, pause_s=pause_s)
        if STOP in events:
            return web.json_response(_whole())
        if drops:
            _drop(request)
        half = orjson.dumps(_whole())[: 20 * len(events)]
        return web.Response(body=half, content_type="application/json")

    return fault


def _refuses(status: int, kind: str, **headers: str) -> Fault:
    async def fault(request: web.Request, streamed: bool) -> web.StreamResponse:
        body = error_body(f"The engine says {status}.", kind, status)
        return web.json_response(body, status=status, headers=headers)

    return fault


async def _json_always(request: web.Request, streamed: bool) -> web.StreamResponse:
    return web.json_response(_whole())


async def _silent_at_first(request: web.Request, streamed: bool) -> web.StreamResponse:
    await asyncio.sleep(SILENCE_S)
    return await _stream(request, WHOLE) if streamed else web.json_response(_whole())


SILENCE_S = 6.0
"""Several times the limits that the tests give their clients."""

FAULTS: dict[str, Fault] = {
    "none": _streams(*WHOLE),
    "no finish_reason": _streams(ROLE, HALF, OTHER_HALF, DONE),
    "no [DONE]": _streams(ROLE, HALF, OTHER_HALF, STOP),
    "cut": _streams(ROLE, HALF),
    "empty": _streams(),
    "dropped": _streams(ROLE, HALF, drops=True),
    "dropped at once": _streams(drops=True),
    "an error in the stream": _streams(ROLE, HALF, encode(ENGINE_DIED), DONE),
    "an error first": _streams(encode(ENGINE_DIED), DONE),
    "not JSON": _streams(ROLE, b"data: {bad\n\n", DONE),
    "JSON for a stream": _json_always,
    "404": _refuses(404, "NotFoundError"),
    "400": _refuses(400, "BadRequestError"),
    "429": _refuses(429, "RateLimitError", **{"Retry-After": "1"}),
    "500": _refuses(500, "InternalServerError"),
    "503": _refuses(503, "ServiceUnavailable", **{"Retry-After": "1"}),
    "silent at first": _silent_at_first,
    "slow": _streams(*WHOLE, pause_s=1.0),
}
