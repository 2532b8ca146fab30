"""A proxy and a server that are opened once, to read their routes and metrics. They do not listen
on any address."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute

import fakevllm.demo
from fakevllm.config.model import Config
from fakevllm.web.app import create_routes
from fakevllm.web.proxy_components import open_proxy
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.asgi import Receive, Scope, Send
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app

Result = TypeVar("Result")
HOOKS = Path(fakevllm.demo.__file__).parent / "hooks"
NO_SERVER = "http://127.0.0.1:9"
"""Address at which no server listens."""


@cache
def proxy_parts() -> tuple[Sequence[BaseRoute], CollectorRegistry]:
    """Return the routes and the metrics of a proxy whose settings switch all metrics on."""
    return _in_empty_folder(_proxy_parts)


@cache
def server_routes() -> Sequence[BaseRoute]:
    """Return the routes of a server."""
    return _in_empty_folder(_server_routes)


async def _proxy_parts(folder: Path) -> tuple[Sequence[BaseRoute], CollectorRegistry]:
    row = {"question": "A question of the held-out dataset, which is long enough to be quoted"}
    (folder / "held_out.jsonl").write_text(json.dumps(row))
    config = Config.model_validate(
        {
            "proxy": {"run_dir": folder / "run"},
            "swarm": {"url": NO_SERVER},
            "hooks": {"path": HOOKS},
            "release": {
                "mode": "gated",
                "eval_dataset": folder / "held_out.jsonl",
                "baseline_share": 0.1,
            },
        }
    )
    endpoints = {adapter.path: _answer_nothing for adapter in ADAPTERS.values()}
    async with open_proxy(config) as proxy:
        return create_routes(proxy, endpoints).routes, proxy.metrics.registry


async def _server_routes(folder: Path) -> Sequence[BaseRoute]:
    app = create_app(ServerConfig("fake", folder))
    await app.state.server.close()
    return app.routes


async def _answer_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the routes are only listed")


def _in_empty_folder(work: Callable[[Path], Awaitable[Result]]) -> Result:
    """Await `work` with an empty folder. Log lines, such as the one that the proxy reaches no
    server, are suppressed meanwhile."""

    async def run(folder: Path) -> Result:
        return await work(folder)

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(run(Path(folder)))
    finally:
        logging.disable(before)
