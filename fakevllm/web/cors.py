"""CORS: as with vLLM's defaults, no web page of another site may read an answer."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send
from fakevllm_adapters.http.vary_origin import VaryOrigin


class CorsPreflight:
    """Middleware that answers CORS preflight requests, and adds `Vary: Origin` to all responses."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = VaryOrigin(app)
        self._cors = CORSMiddleware(app, allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                return await self._cors.preflight_response(headers)(scope, receive, send)
        await self._app(scope, receive, send)
