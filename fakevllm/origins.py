"""Web pages of other sites, as vLLM treats them by default: none may read an answer."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from fakevllm_adapters.asgi import AsgiApp, Receive, Scope, Send

_VARY = (b"vary", b"Origin")


class NoOrigins:
    """Refuses a browser's question before its request; every answer says that the origin counts,
    as vLLM's say."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._cors = CORSMiddleware(app, allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "OPTIONS":
            asked = Headers(scope=scope)
            if "origin" in asked and "access-control-request-method" in asked:
                return await self._cors.preflight_response(asked)(scope, receive, send)

        async def varied(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers: list[tuple[bytes, bytes]] = list(message["headers"])
                if not any(name == b"vary" for name, _ in headers):
                    message["headers"] = [*headers, _VARY]
            await send(message)

        await self._app(scope, receive, varied)
