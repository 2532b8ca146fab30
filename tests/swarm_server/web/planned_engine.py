"""An engine on a Unix socket that gives the answers that a test plans, and an app's call to the
server's ASGI endpoint."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.types.weight_versions import WeightGate
from fakevllm_server.web.routes import inference, stored_responses
from fakevllm_server.web.server_state import ServerState

Json = dict[str, Any]
Plan = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""Answers one request to the engine."""

CLOSING: web.AppKey[set[Any]] = web.AppKey("closing")
"""The connections that the engine closes."""

BODY: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(ids: tuple[int, ...] = (7, 8)) -> Json:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "logprobs": {"content": [{"token": "x", "logprob": -0.5} for _ in ids]},
        "finish_reason": "stop",
        "token_ids": list(ids),
    }
    usage = {"completion_tokens": len(ids)}
    return {"choices": [choice], "usage": usage, "prompt_token_ids": [1, 2]}


def chunks() -> list[Json]:
    """Return the chunks of `completion` as a stream."""
    choice = completion()["choices"][0]
    fields = {name: choice[name] for name in ("index", "logprobs", "finish_reason", "token_ids")}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    return [
        {"choices": [opening], "prompt_token_ids": [1, 2]},
        {"choices": [fields | {"delta": {"content": "hi"}}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]


async def answers_whole(request: web.Request) -> web.StreamResponse:
    return web.Response(body=orjson.dumps(completion()), content_type="application/json")


async def answers_stream(request: web.Request) -> web.StreamResponse:
    return await _streamed(request, [*map(encode, chunks()), DONE])


async def dies(request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer, as a killed process does."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def dies_in_stream(request: web.Request) -> web.StreamResponse:
    await _streamed(request, [encode(chunks()[0])])
    return await dies(request)


async def dies_before_the_stream(request: web.Request) -> web.StreamResponse:
    await _streamed(request, [])
    return await dies(request)


def hangs_in_stream(until: asyncio.Event) -> Plan:
    """Return a plan that sends the first event of a stream and then nothing until the test is
    over."""

    async def plan(request: web.Request) -> web.StreamResponse:
        answer = await _streamed(request, [encode(chunks()[0])])
        await until.wait()
        return answer

    return plan


async def stops_in_stream(request: web.Request) -> web.StreamResponse:
    """End the stream without [DONE]."""
    return await _streamed(request, [encode(chunk) for chunk in chunks()])


async def answers_and_closes(request: web.Request) -> web.StreamResponse:
    """Answer, and close the connection without an announcement. A client may not know of this
    before it has sent the next request: here, the next request closes the connection."""
    assert request.protocol is not None
    request.app[CLOSING].add(request.protocol)
    return await answers_whole(request)


@web.middleware
async def _closes_old_connections(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if request.protocol in request.app[CLOSING]:
        return await dies(request)
    return await handler(request)


def answers(status: int, body: bytes, reason: str | None = None) -> Plan:
    headers = {} if reason is None else {REASON_HEADER: reason}

    async def plan(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, body=body, content_type="application/json", headers=headers
        )

    return plan


class PlannedEngine:
    """An engine that answers each POST with the next plan, and records the requests."""

    def __init__(self, folder: Path, *plans: Plan, name: str = "planned", **endpoint: Any) -> None:
        self.endpoint = Endpoint(
            folder / f"{name}.sock", "http://engine", "m", 100, gate=WeightGate(3), **endpoint
        )
        self.is_healthy = True
        self.num_health_checks = 0
        self.plans = deque(plans)
        self.bodies: list[Json] = []
        """Bodies of the requests."""
        self.headers: list[dict[str, str]] = []
        self.got_request = asyncio.Event()
        self.responses: dict[str, Json] = {}
        """Responses that the engine's own route has stored, by id."""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> PlannedEngine:
        app = web.Application(middlewares=[_closes_old_connections])
        app[CLOSING] = set()
        app.router.add_get("/health", self._health)
        app.router.add_get(stored_responses.PATH, self._stored_response)
        app.router.add_post(stored_responses.CANCEL_PATH, self._stored_response)
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.endpoint.socket)).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.num_health_checks += 1
        return web.Response(status=200 if self.is_healthy else 503)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"path": request.path})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(orjson.loads(await request.read()))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.got_request.set()
        if not self.plans and request.path == "/v1/responses":
            return await self._make_response(request, self.bodies[-1])
        plan = self.plans.popleft()
        self.is_healthy = self.is_healthy and bool(self.plans or plan not in DEADLY)
        return await plan(request)

    async def _make_response(self, request: web.Request, body: Json) -> web.StreamResponse:
        """Answer on the engine's own route. As in vLLM, the request may choose the id, and GET
        requests of every key get a stored response."""
        response_id: str = body.get("request_id") or f"resp_{len(self.bodies)}"
        response: Json = {"id": response_id, "model": "m", "output": body["input"]}
        if body.get("store", True):
            self.responses[response_id] = response
        if not body.get("stream"):
            return web.json_response(response)
        event = encode({"type": "response.created", "response": response})
        middle = event.index(response_id.encode()) + 3
        return await _streamed(request, [event[:middle], event[middle:], DONE])

    async def _stored_response(self, request: web.Request) -> web.StreamResponse:
        response = self.responses.get(request.match_info["response_id"])
        if response is None:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        return web.json_response(response | {"path": request.path_qs})


DEADLY = (dies, dies_in_stream, dies_before_the_stream)
"""Plans that can kill the engine. If the engine's last plan is one of these, the engine is dead
after this plan."""


async def _streamed(request: web.Request, events: list[bytes]) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for event in events:
        await answer.write(event)
    return answer


class AppCall:
    """One HTTP call to the server's ASGI endpoint, without a socket."""

    def __init__(
        self,
        state: ServerState,
        body: Json | bytes | None = None,
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
        query: bytes = b"",
    ) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.is_ended = False
        self.disconnect = asyncio.Event()
        raw = body if isinstance(body, bytes) else orjson.dumps(BODY | (body or {}))
        self._raw: bytes | None = raw
        pairs = [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
        scope: MutableMapping[str, Any] = {
            "method": method,
            "path": path,
            "query_string": query,
            "headers": pairs,
            "path_params": {},
        }
        formats = {adapter.path: adapter for adapter in ADAPTERS.values()}
        endpoint = inference.create_endpoint(state, formats.get(path))
        if path.startswith("/v1/responses/"):
            scope["path_params"] = {"response_id": path.split("/")[3]}
            endpoint = stored_responses.create_endpoint(state)
        self.task = asyncio.ensure_future(endpoint(scope, self._receive, self._send))

    async def answered(self) -> AppCall:
        """Wait until the call has ended."""
        async with asyncio.timeout(30):
            await self.task
        return self

    @property
    def json(self) -> Json:
        return orjson.loads(self.body)

    async def _receive(self) -> MutableMapping[str, Any]:
        raw, self._raw = self._raw, None
        if raw is not None:
            return {"type": "http.request", "body": raw}
        await self.disconnect.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
            self.is_ended = not message.get("more_body", False)


async def start_server(
    folder: Path, engine: PlannedEngine, config: ServerConfig | None = None
) -> ServerState:
    """Return the state of a server whose engine is `engine` and is serving."""
    if config is None:
        config = ServerConfig("fake", folder / "run")
    config.run_dir.mkdir(exist_ok=True)
    state = ServerState(config)
    state.engine.move(EngineStatus.BOOTING, 0.0)
    await connect_engine(state, engine)
    return state


async def connect_engine(state: ServerState, engine: PlannedEngine) -> None:
    await state.connect(engine.endpoint)
    state.engine.move(EngineStatus.ROLLING, 0.0)
