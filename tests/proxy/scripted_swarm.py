"""A server that answers, in place of a swarm server or a proxy, with replies that a test sets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from multidict import CIMultiDict
from pydantic import BaseModel

from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, LogReply

ROLLING = EngineStatusReply(
    engine_status=EngineStatus.ROLLING, server_id="s", run_id="r", model="fake", global_step=1
)
TIMEOUT_S = 10.0


class ScriptedSwarm:
    """A server with default replies for the routes that a link polls.

    A test sets `answers` by path: a model or JSON value, a text (sent as HTML), a status, or a
    response. A function in `functions` gets the request's body, and returns the answer.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/get_engine_status": ROLLING,
            "/get_train_config": {},
            "/get_run_log": LogReply(entries=[]),
        }
        self.functions: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.statuses: dict[str, int] = {}
        """The status of JSON replies by path, if it is not 200."""
        self.calls: Counter[str] = Counter()
        self.bodies: dict[str, Any] = {}
        """The latest request body by path."""
        self.headers: dict[str, CIMultiDict[str]] = {}
        """The headers of the latest request by path."""
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.headers[request.path] = CIMultiDict(request.headers)
        self.calls[request.path] += 1
        if request.can_read_body:
            self.bodies[request.path] = await request.json()
        answer = self.answers.get(request.path, 404)
        if (function := self.functions.get(request.path)) is not None:
            answer = await function(self.bodies.get(request.path))
        if isinstance(answer, web.Response):
            return answer
        if isinstance(answer, int):
            return web.Response(status=answer)
        if isinstance(answer, str):
            return web.Response(text=answer, content_type="text/html")
        if isinstance(answer, BaseModel):
            answer = answer.model_dump(mode="json")
        return web.json_response(answer, status=self.statuses.get(request.path, 200))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. Raises AssertionError after TIMEOUT_S seconds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.01)
