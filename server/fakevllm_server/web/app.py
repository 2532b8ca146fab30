"""The server's ASGI app. It consists of the server's state, the routes and the access checks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from functools import partial

from fastapi import FastAPI
from starlette.routing import Route

from fakevllm_adapters.formats.registry import ADAPTERS, TOKEN_COUNTERS
from fakevllm_adapters.http.access_guard import Guard, GuardMiddleware
from fakevllm_adapters.http.asgi import AsgiApp, AsgiEndpoint, Receive, Scope, Send
from fakevllm_adapters.http.model_cards import MODEL_CARD_PATHS
from fakevllm_adapters.http.passthrough import PASSTHROUGH
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.latest_call_recorder import LatestCall
from fakevllm_server.web.routes import (
    control,
    episodes,
    groups,
    inference,
    inspection,
    model_cards,
    refusals,
    stored_responses,
    uploads,
    versions,
)
from fakevllm_server.web.routes.authorization import (
    ADMIN_PATHS,
    invalid_key_error,
    is_key_of_episode,
)
from fakevllm_server.web.server_state import ServerState


def create_app(config: ServerConfig) -> FastAPI:
    """Return the server's ASGI app. If an engine was running when the previous server process died,
    the app starts the engine again. When the app ends, it stops the engine.

    Raises ConfigError if the run directory or the model cannot be used.
    """
    state = ServerState(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        state.follow_curves()
        state.prune_calls()
        await state.resume()
        yield
        await asyncio.shield(state.close())
        logging.getLogger("fakevllm.server").info("stopped")

    app = FastAPI(title="fakevllm-server", lifespan=lifespan)
    refusals.add_handlers(app)
    # The router tries the routes in order, so the most frequent requests come first.
    for module in (groups, control, versions, uploads, episodes):
        app.include_router(module.router(state))
    latest_call = LatestCall() if config.keep_latest_call else None
    app.include_router(inspection.router(state, latest_call))
    model_calls = _add_engine_routes(app, state, latest_call)
    app.add_middleware(FastPaths, endpoints=model_calls)
    guard = Guard(
        config.keys,
        hosts=config.hosts,
        hosts_setting="those of --allow-host",
        admin_paths=ADMIN_PATHS,
        accepts_extra_key=partial(is_key_of_episode, state),
        invalid_key_error=partial(invalid_key_error, state),
    )
    app.add_middleware(GuardMiddleware, guard=guard)
    app.state.server = state
    return app


EPISODE_PREFIX = "/e/"
"""Prefix of the paths of an episode. In such a path, the uuid of the episode comes after the
prefix."""


class FastPaths:
    """ASGI middleware that passes a POST request for a model call directly to its endpoint, also
    below `/e/UUID` (the base URL of an episode). All other requests go to `app`.

    The direct call saves the cost of the framework's own middlewares and of its router. For these
    paths, the router's own routes are needed only to refuse other HTTP methods with 405.
    """

    def __init__(self, app: AsgiApp, endpoints: Mapping[str, AsgiApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            endpoint = self._endpoints.get(path)
            if path.startswith(EPISODE_PREFIX):
                uuid, slash, rest = path.removeprefix(EPISODE_PREFIX).partition("/")
                endpoint = self._endpoints.get(slash + rest) if uuid else None
                scope["path_params"] = {"episode_uuid": uuid}
        await (endpoint or self._app)(scope, receive, send)


def _add_engine_routes(
    app: FastAPI, state: ServerState, latest_call: LatestCall | None
) -> dict[str, AsgiApp]:
    """Add the routes whose requests are answered by the engine. Each route is also added below
    `/e/UUID`, the base URL of an episode. Return the endpoints of model calls, by path."""
    model_calls: dict[str, AsgiApp] = {}
    formats = {
        adapter.path: (["POST"], adapter) for adapter in (ADAPTERS | TOKEN_COUNTERS).values()
    }
    passthrough = PASSTHROUGH | {"/v1/models": ("GET",), "/metrics": ("GET",)}
    relayed = {
        path: (list(methods), None) for path, methods in passthrough.items() if path not in formats
    }
    for path, (methods, adapter) in (formats | relayed).items():
        endpoint = inference.create_endpoint(state, adapter)
        if latest_call is not None and adapter is not None and adapter.name in ADAPTERS:
            endpoint = latest_call.record(endpoint, adapter.name)
        if adapter is not None:
            model_calls[path] = endpoint
        _add_route(app, path, endpoint, methods)
    card = model_cards.create_endpoint(state)
    for path in MODEL_CARD_PATHS:
        _add_route(app, path, card, ["GET"])
    stored = stored_responses.create_endpoint(state)
    # GET is first: a 405 names the first method of a path, and vLLM's 405 for PATH names GET.
    for path, method in (
        (stored_responses.PATH, "GET"),
        (stored_responses.PATH, "DELETE"),
        (stored_responses.CANCEL_PATH, "POST"),
    ):
        _add_route(app, path, stored, [method])
    return model_calls


def _add_route(app: FastAPI, path: str, endpoint: AsgiApp, methods: list[str]) -> None:
    for prefix in ("", EPISODE_PREFIX + "{episode_uuid}"):
        app.router.routes.append(Route(prefix + path, AsgiEndpoint(endpoint), methods=methods))
