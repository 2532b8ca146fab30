"""An engine process's door: vLLM's HTTP over a TokenEngine, control routes over a TrainEngine, on
a Unix socket. A trainer alone has the control routes and /health.

Control routes (`/control/…`) are for the server that started the process; the socket's folder
keeps others out.
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
from fakevllm_server.backends.http.control_door import Control
from fakevllm_server.backends.http.routes import PublicRoutes, get_route
from fakevllm_server.backends.process.uvicorn_server import GracefulServer
from fakevllm_server.types.backend import TokenEngine, TrainEngine


def serve(
    engine: TokenEngine | None, trainer: TrainEngine, socket: Path, *, on_close: Callable[[], None]
) -> None:
    """Serves until SIGTERM, or until standard input closes: the parent that held it is gone.
    Without an `engine` nothing samples."""
    config = uvicorn.Config(
        create_app(engine, trainer),
        uds=str(socket),
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
    )
    server = GracefulServer(config)
    try:
        asyncio.run(_serve_until_orphaned(server))
    finally:
        on_close()


async def _serve_until_orphaned(server: uvicorn.Server) -> None:
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin.fileno())
            server.should_exit = server.force_exit = True

    loop.add_reader(sys.stdin.fileno(), orphaned)
    await server.serve()


def create_app(engine: TokenEngine | None, trainer: TrainEngine) -> Starlette:
    public = [] if engine is None else PublicRoutes(engine).routes()
    return Starlette(
        routes=[*public, get_route("/health", _health), *Control(engine, trainer).routes()],
        exception_handlers={HTTPException: _not_served},
        middleware=[Middleware(VaryOrigin)],
    )


async def _health(request: Request) -> Response:
    return Response()


async def _not_served(request: Request, error: Exception) -> Response:
    """404 and 405, worded as FastAPI words them for vLLM."""
    assert isinstance(error, HTTPException)
    return Response(
        orjson.dumps({"detail": error.detail}),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )
