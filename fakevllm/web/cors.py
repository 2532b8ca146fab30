"""CORS: permission for web pages and desktop apps of other origins to use the routes below /v1/.

By default, no other origin may use these routes. The setting `proxy.allowed_origins` lists the
origins that may use them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send, header_map
from fakevllm_adapters.http.vary_origin import VaryOrigin
from fakevllm_runtime.log_throttle import LogThrottle

log = logging.getLogger("fakevllm.web.cors")

LOG_EVERY_S = 60.0
"""Seconds between two log lines about refused origins."""
_PATHS = "/v1/"
_REMEDY = "add it to `proxy.allowed_origins`"
_MAX_SHOWN_CHARS = 200
_ALLOW_ORIGIN = b"access-control-allow-origin"
_PRIVATE_NETWORK = b"access-control-request-private-network"


class AllowedOrigins:
    """The origins that may use the routes below /v1/, from the setting `proxy.allowed_origins`.
    Refusals are logged."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)
        self._throttle = LogThrottle(LOG_EVERY_S)

    def accepts(self, origin: str, path: str) -> bool:
        """Return True if web pages of `origin` may use `path`, according to the setting
        `proxy.allowed_origins`."""
        return path.startswith(_PATHS) and ("*" in self._origins or origin in self._origins)

    def header_value(self, origin: str) -> str:
        """Return the value of the response header `Access-Control-Allow-Origin` for an allowed
        origin."""
        return "*" if "*" in self._origins else origin

    def report_refusal(self, origin: str, path: str) -> str:
        """Log that a request from this origin is refused. Return a text that tells the user how to
        allow the origin.

        The text is empty for a path outside /v1/, because such a path cannot be opened to other
        origins.
        """
        if not path.startswith(_PATHS):
            return ""
        due = self._throttle.due("refused", time.monotonic())
        if due is not None:
            log.warning(
                "a request from the origin %r is refused: to allow this web page or desktop app, "
                "%s%s",
                origin[:_MAX_SHOWN_CHARS],
                _REMEDY,
                f" ({due.num_suppressed} refusals since the last such line)"
                if due.num_suppressed
                else "",
            )
        return _REMEDY


class CorsPreflight:
    """Middleware that answers CORS preflight requests, and adds `Vary: Origin` to responses without
    a `Vary` header."""

    def __init__(self, app: AsgiApp, allowed: AllowedOrigins) -> None:
        self._app = VaryOrigin(app)
        self._allowed = allowed
        self._refusing = CORSMiddleware(app, allow_methods=["*"], allow_headers=["*"])
        self._accepting = CORSMiddleware(
            app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                return await self._answer(headers, scope, receive, send)
        await self._app(scope, receive, send)

    async def _answer(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        origin, path = headers["origin"], scope["path"]
        if not self._allowed.accepts(origin, path):
            self._allowed.report_refusal(origin, path)
            return await self._refusing.preflight_response(headers)(scope, receive, send)
        # Older versions of Starlette do not know private networks, and newer ones refuse them.
        is_private = _PRIVATE_NETWORK.decode() in headers
        raw = [header for header in headers.raw if header[0] != _PRIVATE_NETWORK]
        response = self._accepting.preflight_response(Headers(raw=raw))
        if is_private:
            response.headers["access-control-allow-private-network"] = "true"
        await response(scope, receive, send)


class CorsHeaders:
    """Middleware that adds the CORS headers. With these headers, a browser lets the pages of
    allowed origins read every response, including errors.

    This middleware is the outermost layer, around the access guard. Therefore a page can also read
    the guard's 401 and 429 responses.
    """

    def __init__(self, app: AsgiApp, allowed: AllowedOrigins) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header_map(scope).get(b"origin") if scope["type"] == "http" else None
        if origin is None or not self._allowed.accepts(origin.decode("latin-1"), scope["path"]):
            return await self._app(scope, receive, send)
        added = [
            (_ALLOW_ORIGIN, self._allowed.header_value(origin.decode("latin-1")).encode("latin-1")),
            (b"access-control-expose-headers", b"*"),
        ]

        async def readable(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [one for one in message["headers"] if one[0].lower() != _ALLOW_ORIGIN]
                if not any(name.lower() == b"vary" for name, _ in headers):
                    headers.append((b"vary", b"Origin"))
                message["headers"] = [*headers, *added]
            await send(message)

        await self._app(scope, receive, readable)
