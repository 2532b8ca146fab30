"""Wires the proxy: its parts, its doors, its guard; and runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading

import uvicorn
from fastapi import FastAPI
from starlette.routing import Route

from fakevllm.config import Config
from fakevllm.errors import ConfigError
from fakevllm.graceful import GracefulServer
from fakevllm.origins import NoOrigins
from fakevllm.proxy import Proxy, open_proxy
from fakevllm.routes import formats, groups, health, metrics, models, passthrough
from fakevllm_adapters.asgi import Door
from fakevllm_adapters.bounded_http import bounded_http
from fakevllm_adapters.guard import Guard, GuardMiddleware
from fakevllm_adapters.limits import OpenCalls
from fakevllm_adapters.registry import ADAPTERS

KEEP_ALIVE_S = 65
"""Longer than SDKs keep idle connections, so that it is they who close them."""


def create_app(proxy: Proxy) -> FastAPI:
    app = FastAPI(title="fakevllm", docs_url=None, redoc_url=None, openapi_url=None)
    for module in (health, models, metrics, passthrough, groups):
        app.include_router(module.router(proxy))
    for adapter in ADAPTERS.values():
        app.router.routes.append(
            Route(adapter.path, Door(formats.door(proxy, adapter)), methods=["POST"])
        )
    limits = proxy.config.limits
    guard = Guard(
        proxy.config.keys(),
        hosts=proxy.config.hosts,
        own_keys=lambda key, path: path.startswith("/v1/") and proxy.tasks.knows(key),
        limits=limits.per_request,
        open_calls=OpenCalls(limits.num_open, limits.num_open_per_key),
    )
    app.add_middleware(NoOrigins)
    app.add_middleware(GuardMiddleware, guard=guard)
    return app


def serve(config: Config, *, until_stdin_closes: bool = False) -> None:
    """Runs the proxy until it is told to stop. Raises UserError."""
    if until_stdin_closes:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    config.keys()
    listener = _bind(config.proxy.host, config.proxy.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, listener))


async def _serve(config: Config, listener: socket.socket) -> None:
    async with open_proxy(config) as proxy:
        server = GracefulServer(
            uvicorn.Config(
                create_app(proxy),
                http=bounded_http(),  # pyright: ignore[reportArgumentType]
                log_level="warning",
                access_log=False,
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
