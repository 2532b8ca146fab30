"""Wires the server: the swarm's state, its routes, its guard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fastapi import FastAPI
from starlette.routing import Route

from fakevllm_adapters.asgi import Door
from fakevllm_adapters.guard import Guard, GuardMiddleware
from fakevllm_server.api import control, episodes, groups, inference
from fakevllm_server.config import ServerConfig
from fakevllm_server.swarm import Swarm

INFERENCE = {"/v1/chat/completions": ["POST"], "/v1/models": ["GET"]}


def create_app(config: ServerConfig) -> FastAPI:
    swarm = Swarm(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        await asyncio.shield(swarm.close())

    app = FastAPI(title="fakevllm-server", lifespan=lifespan)
    for module in (control, groups, episodes):
        app.include_router(module.router(swarm))
    for path, methods in INFERENCE.items():
        door = Door(inference.door(swarm, path))
        app.router.routes.append(Route(path, door, methods=methods))
        app.router.routes.append(Route(f"/e/{{episode_uuid}}{path}", door, methods=methods))
    guard = Guard(
        config.keys,
        hosts=config.hosts,
        open_paths={"/health"},
        own_keys=lambda key, path: (
            path.startswith(("/v1/", "/e/")) and swarm.episodes.of_key(key) is not None
        ),
    )
    app.add_middleware(GuardMiddleware, guard=guard)
    app.state.swarm = swarm
    return app
