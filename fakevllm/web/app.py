"""Wires the proxy: its parts, its doors, its guard; and runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping

import uvicorn
from fastapi import FastAPI
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fakevllm.config.model import Config
from fakevllm.errors import ConfigError
from fakevllm.runtime.log_throttle import LogThrottle
from fakevllm.runtime.uvicorn_server import GracefulServer
from fakevllm.web.components import ProxyComponents, open_proxy
from fakevllm.web.cors import CorsPreflight
from fakevllm.web.routes import admin, feedback, inference, passthrough
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.asgi import AsgiApp, AsgiEndpoint, Receive, Scope, Send
from fakevllm_adapters.http.guard import Guard, GuardMiddleware
from fakevllm_adapters.http.head_limit import limit_head
from fakevllm_adapters.http.log_format import LogFormat, set_up_logging
from fakevllm_adapters.http.open_calls import OpenCalls

log = logging.getLogger("fakevllm.web.app")

TELL_EVERY_S = 60.0
"""Between warnings of the same stray path."""
KEEP_ALIVE_S = 65
"""Longer than SDKs keep idle connections, so that it is they who close them."""


def create_app(proxy: ProxyComponents) -> AsgiApp:
    doors = {adapter.path: inference.door(proxy, adapter) for adapter in ADAPTERS.values()}
    return GuardMiddleware(
        CorsPreflight(FastPathRouter(create_routes(proxy, doors), doors)), _guard(proxy)
    )


def create_routes(proxy: ProxyComponents, doors: Mapping[str, AsgiApp]) -> FastAPI:
    app = FastAPI(title="fakevllm", docs_url=None, redoc_url=None, openapi_url=None)
    for module in (passthrough, admin, feedback):
        app.include_router(module.router(proxy))
    for path, door in doors.items():
        app.router.routes.append(Route(path, AsgiEndpoint(door), methods=["POST"]))
    return app


class FastPathRouter:
    """The busy paths, without the way through the framework; the framework has them too, for what
    is asked of them by another method."""

    def __init__(self, app: AsgiApp, doors: Mapping[str, AsgiApp]) -> None:
        self._app = app
        self._doors = doors
        self._ends = tuple(path.removeprefix("/v1") for path in doors)
        self._throttle = LogThrottle(TELL_EVERY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_posted = scope["type"] == "http" and scope["method"] == "POST"
        door = self._doors.get(scope["path"]) if is_posted else None
        if is_posted and door is None:
            self._tell_of_stray(scope["path"])
        await (door or self._app)(scope, receive, send)

    def _tell_of_stray(self, path: str) -> None:
        """Of an app whose base URL has no /v1, or two of them, and that gets 404 for it."""
        is_stray = path.endswith(self._ends)
        if is_stray and self._throttle.due(path, time.monotonic()) is not None:
            log.warning(
                "%s is no path of this proxy: an app's base URL is http://HOST:PORT/v1, and the "
                "app adds the rest",
                path,
            )


def _guard(proxy: ProxyComponents) -> Guard:
    limits = proxy.config.limits
    return Guard(
        proxy.config.keys(),
        hosts=proxy.config.hosts,
        hosts_setting="`proxy.allowed_hosts`",
        admin_paths=admin.ADMIN_PATHS,
        accepts_extra_key=lambda key, path: path.startswith("/v1/") and proxy.tasks.knows(key),
        limits=limits.per_request,
        open_calls=OpenCalls(limits.num_open, limits.num_open_per_key),
    )


def serve(
    config: Config,
    *,
    log_format: LogFormat = "human",
    until_stdin_closes: bool = False,
    listen_fd: int | None = None,
) -> None:
    """Runs the proxy until it is told to stop. `listen_fd`: of the socket that a parent listens on
    for it. Raises UserError."""
    if until_stdin_closes:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    set_up_logging(log_format)
    config.keys()
    if listen_fd is not None:
        listener = socket.socket(fileno=listen_fd)
    else:
        listener = _bind(config.proxy.host, config.proxy.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, listener))


async def _serve(config: Config, listener: socket.socket) -> None:
    async with open_proxy(config) as proxy:
        server = GracefulServer(
            uvicorn.Config(
                create_app(proxy),
                http=limit_head(AutoHTTPProtocol),
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=5,
                ws="none",
            )
        )
        logging.getLogger("fakevllm").info(
            "listening on http://%s:%d/v1, swarm server %s",
            *listener.getsockname()[:2],
            config.swarm.url,
        )
        if config.hooks.path is None:
            logging.getLogger("fakevllm").info(
                "no hooks: every request is served once, none is trained; --hooks names yours"
            )
        await server.serve(sockets=[listener])
    logging.getLogger("fakevllm").info("stopped")


def _leave_with_parent() -> None:
    """A parent that dies, however it dies, closes the pipe it holds."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} cannot be used ({error.strerror}): choose another --port."
        ) from None
    listener.listen(2048)
    return listener


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.Loop
