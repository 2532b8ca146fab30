"""A server that receives alerts on a free port of this machine."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from aiohttp import web


class AlertReceiver:
    """A server that keeps all alerts. It answers with the statuses in `statuses`, one after the
    other, and with 204 from then on. With `hangs`, it answers nobody until `release` is called."""

    def __init__(self, *statuses: int, hangs: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.alerts: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        """Event that is set when the first alert has arrived."""
        self._statuses = list(statuses)
        self._may_answer = asyncio.Event()
        if not hangs:
            self._may_answer.set()
        self.url = ""

    def release(self) -> None:
        """Let the server answer."""
        self._may_answer.set()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/hook/secret-path"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.headers.append(dict(request.headers))
        self.alerts.append(await request.json())
        self.arrived.set()
        await self._may_answer.wait()
        status = self._statuses.pop(0) if self._statuses else 204
        headers = {"Location": "/elsewhere"} if 300 <= status < 400 else {}
        return web.Response(status=status, headers=headers)
