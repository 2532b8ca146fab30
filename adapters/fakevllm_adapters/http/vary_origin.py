"""Middleware that adds the header `vary: Origin`, which every response of vLLM has."""

from __future__ import annotations

from collections.abc import Awaitable, MutableMapping
from typing import Any

from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send

_VARY = (b"vary", b"Origin")


class VaryOrigin:
    """ASGI middleware that adds `vary: Origin` to responses that have no `vary` header."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not a coroutine of its own, because a stream calls it for every token.
        def varied(message: MutableMapping[str, Any]) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers: list[tuple[bytes, bytes]] = list(message["headers"])
                if b"vary" not in dict(headers):
                    message["headers"] = [*headers, _VARY]
            return send(message)

        await self._app(scope, receive, varied)
