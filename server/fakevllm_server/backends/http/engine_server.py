"""The HTTP server of an engine's process, on a Unix socket.

A TokenEngine (an engine that samples tokens) answers vLLM's public routes. A TrainEngine (an engine
that trains) answers the control routes (`/control/…`). A process that only trains has only the
control routes and /health.

The control routes are for the swarm server that started the process. The permissions of the
socket's folder keep other users out.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from fakevllm_adapters.http.vary_origin import VaryOrigin
from fakevllm_runtime.http_server import GracefulServer
from fakevllm_server.backends.http.control_routes import ControlRoutes
from fakevllm_server.backends.http.policies import PolicyEngine
from fakevllm_server.backends.http.preparation import PreparationThreads
from fakevllm_server.backends.http.vllm_routes import PublicRoutes, get_route
from fakevllm_server.types.backend import TokenEngine, TrainEngine


def serve(
    engine: TokenEngine | None,
    trainer: TrainEngine,
    socket: Path,
    *,
    policies: PolicyEngine | None = None,
    on_close: Callable[[], None],
) -> None:
    """Serve HTTP on `socket` until SIGTERM, or until standard input closes.

    The swarm server holds the other end of standard input. Therefore a closed input means that the
    swarm server has died. If `engine` is None, the process only trains. Some engines can hold
    further sets of weights, called policies, beside the trained weights. For such an engine, pass
    the engine as `policies` too. For other engines, `policies` is None. `on_close` is called when
    serving ends, also after an error.
    """
    threads = PreparationThreads()
    config = uvicorn.Config(
        create_app(engine, trainer, threads, policies),
        uds=str(socket),
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
    )
    server = GracefulServer(config)
    try:
        asyncio.run(_serve_until_stdin_closes(server))
    finally:
        threads.close()
        on_close()


async def _serve_until_stdin_closes(server: uvicorn.Server) -> None:
    loop = asyncio.get_running_loop()

    def stop_at_end_of_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin.fileno())
            server.should_exit = server.force_exit = True

    loop.add_reader(sys.stdin.fileno(), stop_at_end_of_stdin)
    await server.serve()


def create_app(
    engine: TokenEngine | None,
    trainer: TrainEngine,
    threads: PreparationThreads,
    policies: PolicyEngine | None = None,
) -> Starlette:
    """Return the ASGI app of an engine's process. If `engine` is None, the process only trains, and
    the app has none of vLLM's routes except /health. `threads` parse and check requests. Some
    engines can hold further sets of weights, called policies, beside the trained weights. For such
    an engine, pass the engine as `policies` too. For other engines, `policies` is None."""
    public = [] if engine is None else PublicRoutes(engine, threads, policies).routes()
    control = ControlRoutes(engine, trainer, policies).routes()
    return Starlette(
        routes=[*public, get_route("/health", _health), *control],
        exception_handlers={HTTPException: _http_error},
        middleware=[Middleware(VaryOrigin)],
    )


async def _health(request: Request) -> Response:
    return Response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the response for HTTP error 404 or 405. The response has the same body as in vLLM,
    which uses FastAPI."""
    assert isinstance(error, HTTPException)
    return Response(
        orjson.dumps({"detail": error.detail}),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )
