"""The console's ASGI application: its routes, the access guard, and the headers of each response.

A request passes these checks in order: its `Host` and `Origin` (as at the proxy and the server),
the size of its body, and the login. A form must also have its token.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, StreamingResponse
from starlette.staticfiles import StaticFiles

from fakevllm.console.access import login as login_module
from fakevllm.console.access.login import Login
from fakevllm.console.change_events import ChangeEvents
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.page_renderer import STATIC
from fakevllm.console.pages import (
    configuration,
    evaluations,
    feedback,
    groups,
    hooks,
    learning,
    now,
    releases,
    sessions,
    training_switch,
)
from fakevllm.errors import LedgerError
from fakevllm_adapters.http.access_guard import Guard, GuardMiddleware
from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.protocol.errors import WireError

MAX_BODY_BYTES = 1024 * 1024
"""Maximum size of a form. The largest form has a corrected answer."""
PAGES = (
    *(now, learning, groups, sessions, feedback, hooks),
    *(evaluations, releases, configuration, training_switch),
)
"""The modules of the pages. Each has a function `router`. All of them need a login."""
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        b"object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    # `no-referrer` would also let browsers send forms with the origin `null`.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Headers of every response. Pages cannot run inline scripts, load anything from other sites, or be
shown in a frame."""

log = logging.getLogger("fakevllm.console.web_app")


def create_app(parts: ConsoleParts, events: ChangeEvents) -> AsgiApp:
    """Return the console's ASGI application, including the access guard."""
    login = Login(parts)
    app = FastAPI(title="fakevllm console", docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=STATIC), "static")
    app.include_router(login_module.router(parts, login))
    app.include_router(_health())
    for module in PAGES:
        app.include_router(module.router(parts), dependencies=[Depends(login.require)])
    app.include_router(_events(login, events), dependencies=[Depends(login.require)])
    for kind, handler in login_module.handlers(parts, login).items():
        app.add_exception_handler(kind, handler)
    _add_error_pages(app, parts, login)
    guard = Guard(
        hosts=parts.settings.hosts,
        hosts_setting="`--allow-host`",
        limits=Limits(body_bytes=MAX_BODY_BYTES),
    )
    return ResponseHeaders(GuardMiddleware(app, guard))


class ResponseHeaders:
    """ASGI middleware that adds the headers of every response. Pages are never stored by the
    browser, because they have texts of apps."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_static = scope.get("path", "").startswith("/static/")
        cache = b"no-cache" if is_static else b"no-store"

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    *HEADERS,
                    (b"cache-control", cache),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _health() -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    def health() -> Response:
        return Response()

    return routes


def _events(login: Login, events: ChangeEvents) -> APIRouter:
    routes = APIRouter()

    @routes.get("/events")
    async def stream(request: Request) -> Response:
        if events.is_full:
            return PlainTextResponse("Too many pages are open: close some.", 503)
        cookie = login.cookie(request)
        return StreamingResponse(
            events.stream(lambda: login.session_of(cookie) is not None),
            media_type="text/event-stream",
        )

    return routes


def _add_error_pages(app: FastAPI, parts: ConsoleParts, login: Login) -> None:
    def ledger_trouble(request: Request, error: Exception) -> Response:
        return parts.page(request, "message.html", status=503, message=str(error))

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405 and request.method == "GET":  # the address of a form was typed or kept
            return RedirectResponse("/", 303)
        if status != 404:
            return PlainTextResponse(f"Status {status}.", status)
        if login.session_of(login.cookie(request)) is None:
            return login_module.login_instead(parts, login, request)
        return parts.page(request, "message.html", status=404, message="There is no such page.")

    def failure(request: Request, error: Exception) -> Response:
        log.error("the page %s failed", request.url.path, exc_info=error)
        message = "This page failed because of a mistake in fakevllm: see the console's log."
        return parts.page(request, "message.html", status=500, message=message)

    def wire_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, WireError)
        return PlainTextResponse(str(error), error.status)

    app.add_exception_handler(WireError, wire_error)
    app.add_exception_handler(LedgerError, ledger_trouble)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, failure)
