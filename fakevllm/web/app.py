"""The proxy's ASGI application, its access guard, and the function that serves the application."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from sqlalchemy.exc import DatabaseError
from starlette.routing import Route

from fakevllm.config.model import Config
from fakevllm.config.setting_origins import SettingSources
from fakevllm.web.cors import AllowedOrigins, CorsHeaders, CorsPreflight
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm.web.routes import (
    admin,
    configuration,
    evaluation,
    feedback,
    forgetting,
    inference,
    passthrough,
    stored_responses,
)
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.access_guard import Guard, GuardMiddleware
from fakevllm_adapters.http.asgi import AsgiApp, AsgiEndpoint, Receive, Scope, Send
from fakevllm_adapters.http.concurrency_limit import OpenCalls
from fakevllm_adapters.http.http_url import http_url
from fakevllm_adapters.http.log_format import LogFormat, redact_logs, set_up_logging
from fakevllm_adapters.protocol.errors import error_of_failure, unavailable
from fakevllm_adapters.protocol.keys import fingerprint
from fakevllm_runtime.http_server import (
    GracefulServer,
    listening_socket,
    public_server_config,
    stop_when_stdin_closes,
)
from fakevllm_runtime.log_throttle import LogThrottle
from fakevllm_runtime.open_files import FileBudget, raise_file_limit

log = logging.getLogger("fakevllm.web.app")

WARN_EVERY_S = 60.0
"""Minimum number of seconds between two equal log lines."""


def create_app(proxy: ProxyComponents) -> AsgiApp:
    """Return the proxy's ASGI application, including the access guard and CORS."""
    endpoints = {
        adapter.path: inference.create_endpoint(proxy, adapter) for adapter in ADAPTERS.values()
    }
    router = FastPathRouter(create_routes(proxy, endpoints), endpoints)
    origins = AllowedOrigins(proxy.config.proxy.allowed_origins)
    guarded = GuardMiddleware(CorsPreflight(router, origins), _guard(proxy, origins))
    return CorsHeaders(guarded, origins)


def create_routes(proxy: ProxyComponents, endpoints: Mapping[str, AsgiApp]) -> FastAPI:
    """Return the FastAPI application with all routes of the proxy. `endpoints` maps paths to the
    endpoints for model calls, such as chat completions."""
    app = FastAPI(title="fakevllm", docs_url=None, redoc_url=None, openapi_url=None)
    throttle = LogThrottle(WARN_EVERY_S)

    def refuse_unread(_: Request, error: Exception) -> Response:
        """Return a 503 if a route failed because the ledger, the proxy's database, could not be
        read."""
        cause = str(getattr(error, "orig", error))
        if throttle.due(cause, time.monotonic()) is not None:
            log.error("the ledger cannot be read: %s", cause)
        return passthrough.error_response(unavailable("The proxy's ledger cannot be read."))

    def report_failure(_: Request, failure: Exception) -> Response:
        """Return the error response for an exception that a route raised. The response has the
        format of vLLM's errors."""
        return passthrough.error_response(error_of_failure(failure))

    app.add_exception_handler(DatabaseError, refuse_unread)
    app.add_exception_handler(Exception, report_failure)
    for module in (
        passthrough,
        stored_responses,
        admin,
        feedback,
        evaluation,
        forgetting,
        configuration,
    ):
        app.include_router(module.router(proxy))
    for path, endpoint in endpoints.items():
        app.router.routes.append(Route(path, AsgiEndpoint(endpoint), methods=["POST"]))
    return app


class FastPathRouter:
    """Router that passes a POST request for a model call directly to the endpoint for the request's
    path. All other requests go to `app`, the FastAPI application.

    The direct call saves the cost of FastAPI's routing. `app` has routes for the paths of model
    calls too, but only to refuse other HTTP methods with 405.
    """

    def __init__(self, app: AsgiApp, endpoints: Mapping[str, AsgiApp]) -> None:
        self._app = app
        self._endpoints = endpoints
        self._path_ends = tuple(path.removeprefix("/v1") for path in endpoints)
        self._throttle = LogThrottle(WARN_EVERY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if is_post and endpoint is None:
            self._warn_of_wrong_path(scope["path"])
        await (endpoint or self._app)(scope, receive, send)

    def _warn_of_wrong_path(self, path: str) -> None:
        """Log a warning if the path shows that the app's base URL lacks /v1 or contains /v1 twice.
        Such an app gets a 404."""
        is_wrong_base = path.endswith(self._path_ends)
        if is_wrong_base and self._throttle.due(path, time.monotonic()) is not None:
            log.warning(
                "%s is not a path of this proxy: set the app's base URL to http://HOST:PORT/v1 "
                "(the app adds the rest of the path)",
                path,
            )


def _guard(proxy: ProxyComponents, origins: AllowedOrigins) -> Guard:
    limits = proxy.config.limits
    return Guard(
        proxy.config.keys(),
        hosts=proxy.config.hosts,
        hosts_setting="`proxy.allowed_hosts`",
        accepts_origin=origins.accepts,
        on_refused_origin=origins.report_refusal,
        admin_paths=admin.ADMIN_PATHS,
        accepts_extra_key=lambda key, path: path.startswith("/v1/") and proxy.tasks.knows(key),
        limits=limits.per_request,
        open_calls=OpenCalls(
            limits.num_open,
            limits.num_open_per_key,
            lambda key: proxy.tasks.registering_key(key) or fingerprint(key),
        ),
    )


def serve(
    config: Config,
    *,
    sources: SettingSources = SettingSources(),
    log_format: LogFormat = "human",
    until_stdin_closes: bool = False,
    listen_fd: int | None = None,
) -> None:
    """Run the proxy until a signal stops it.

    `sources` are the places from which `config` was read. The route for the settings names them. If
    `until_stdin_closes` is True, the proxy also stops when its standard input closes. The standard
    input closes when the parent process ends. `listen_fd` is the file descriptor of a listening
    socket that the parent process has opened. If `listen_fd` is None, the proxy opens a socket
    itself. Raises UserError for mistakes that the user can fix.
    """
    if until_stdin_closes:
        stop_when_stdin_closes()
    set_up_logging(log_format)
    config.keys()
    files = raise_file_limit()
    listener = listening_socket(config.proxy.host, config.proxy.port, listen_fd)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, sources, listener, files))


async def _serve(
    config: Config, sources: SettingSources, listener: socket.socket, files: FileBudget
) -> None:
    async with open_proxy(config, files, sources) as proxy:
        redact_logs(lambda: proxy.redaction.redactor)
        server = GracefulServer(
            public_server_config(create_app(proxy), files.num_connections),
            on_stop=proxy.hooks.reloader.stop if proxy.hooks is not None else lambda: None,
        )
        logging.getLogger("fakevllm").info(
            "listening on %s/v1, swarm server %s, ledger %s",
            http_url(*listener.getsockname()[:2]),
            config.swarm.url,
            config.ledger_file,
        )
        if config.hooks.path is None:
            logging.getLogger("fakevllm").info(
                "no hooks: every request is served once and not trained; name a folder of hooks "
                "with --hooks"
            )
        await server.serve(sockets=[listener])
    logging.getLogger("fakevllm").info("stopped")


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Return the class of uvloop's event loop. If uvloop is not installed, return None, which
    selects asyncio's standard event loop."""
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.Loop
