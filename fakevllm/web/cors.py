"""Web pages of other sites, as vLLM treats them by default: none may read an answer."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send
from fakevllm_adapters.http.vary_origin import VaryOrigin


class CorsPreflight:
    """Refuses what a browser asks before its request; every answer says that the origin counts."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = VaryOrigin(app)
        self._cors = CORSMiddleware(app, allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            asked = Headers(scope=scope)
            if "origin" in asked and "access-control-request-method" in asked:
                return await self._cors.preflight_response(asked)(scope, receive, send)
        await self._app(scope, receive, send)
