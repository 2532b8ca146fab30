"""A swarm server in a thread, whose model server produces the fault that the request names."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.swarm import (
    SIBLING_HEADER,
    EngineStatus,
    EngineStatusReply,
    LogReply,
    SiblingRef,
    parse_sibling,
)
from tests.clients.faults import FAULTS, SILENCE_S, TOOL_FAULTS

Json = dict[str, Any]

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


@dataclass(slots=True)
class Script:
    """The fault for requests whose text contains `mark`."""

    mark: str
    fault: str
    silence_s: float
    failing: int | None = None
    """Number of requests that fail; later requests are answered."""
    failing_siblings: int | None = None
    """Number of siblings of each request that fail, the lead first."""
    requests: dict[str, float] = field(default_factory=dict[str, float])
    """Start times of the requests by id."""

    def fault_of(self, sibling: SiblingRef) -> str:
        self.requests.setdefault(sibling.group_id, time.monotonic())
        number = list(self.requests).index(sibling.group_id)
        is_over = self.failing is not None and number >= self.failing
        is_spared = self.failing_siblings is not None and sibling.index >= self.failing_siblings
        return "none" if is_over or is_spared else self.fault


class FaultySwarm:
    def __init__(self) -> None:
        self.url = ""
        self._scripts: dict[str, Script] = {}

    def expect(self, script: Script) -> Script:
        self._scripts[script.mark] = script
        return script

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
        app.router.add_get("/get_engine_status", _reply_with(ROLLING.model_dump(mode="json")))
        app.router.add_get("/get_train_config", _reply_with({}))
        app.router.add_get(
            "/get_run_log", _reply_with(LogReply(entries=[]).model_dump(mode="json"))
        )
        sampled_paths = {adapter.upstream_path for adapter in ADAPTERS.values()}
        for path in sampled_paths:
            app.router.add_post(path, self._sampled)
        for path in {adapter.path for adapter in ADAPTERS.values()} - sampled_paths:
            app.router.add_post(path, self._native)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        ready.set()
        await self._ended.wait()
        await runner.cleanup()

    async def _sampled(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        script = self._script_of(raw)
        request[SILENCE_S] = script.silence_s
        name = script.fault_of(_sibling_of(request))
        fault = FAULTS.get(name) or TOOL_FAULTS[name]
        play = fault.play(bool(orjson.loads(raw).get("stream")))
        assert play is not None, "no such fault in this mode"
        return await play(request)

    async def _native(self, request: web.Request) -> web.StreamResponse:
        """Refuse a request in its own format, after the translated request was refused."""
        play = FAULTS[self._script_of(await request.read()).fault].streamed
        assert play is not None
        return await play(request)

    def _script_of(self, raw: bytes) -> Script:
        (mark,) = set(re.findall(r"case-\d+-", raw.decode()))
        return self._scripts[mark]


def _sibling_of(request: web.Request) -> SiblingRef:
    """Return the sibling of a call; a call without the header is a request of its own."""
    named = request.headers.get(SIBLING_HEADER)
    return parse_sibling(named) if named is not None else SiblingRef(new_id(), 0)


def _reply_with(body: Json) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    return answer
