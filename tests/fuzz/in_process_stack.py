"""Proxy, swarm server and fake engine in this process, each behind a socket, with their log
checked."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fakevllm.config.model import Config
from fakevllm.web.app import create_app as proxy_app
from fakevllm.web.proxy_components import open_proxy
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_runtime.http_protocol import limited_protocol
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.engine_server import create_app as engine_app
from fakevllm_server.backends.http.preparation import PreparationThreads
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.web.app import create_app as server_app
from fakevllm_server.web.server_state import ServerState

TIMEOUT_S = 30.0
"""Timeout of one request. A slower response counts as hanging."""


class ErrorLog(logging.Handler):
    """Handler that collects errors and tracebacks of all loggers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.messages.append(logging.Formatter().format(record))


@contextlib.contextmanager
def no_traceback() -> Generator[None]:
    """Raise AssertionError if an error or a traceback was logged or printed inside the block."""
    errors, printed = ErrorLog(), io.StringIO()
    logging.getLogger().addHandler(errors)
    try:
        with contextlib.redirect_stderr(printed):
            yield
    finally:
        logging.getLogger().removeHandler(errors)
    assert not errors.messages, errors.messages[0]
    assert "Traceback" not in printed.getvalue(), printed.getvalue()


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass(frozen=True, slots=True)
class Stack:
    """Addresses of the running parts, and an HTTP client."""

    http: aiohttp.ClientSession
    engine: str
    server: str
    proxy: str
    swarm: ServerState

    async def send(self, url: str, raw: bytes, headers: Mapping[str, str]) -> Reply:
        """Send a POST request. Raises TimeoutError."""
        async with (
            asyncio.timeout(TIMEOUT_S),
            self.http.post(url, data=raw, headers=headers) as answer,
        ):
            return Reply(answer.status, answer.headers, await answer.read())


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncGenerator[str]:
    """Run the app behind a real HTTP server, and yield its address."""
    config = uvicorn.Config(
        app,
        port=0,
        http=limited_protocol(AutoHTTPProtocol),
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="off",
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def swarm_over(folder: Path, engine: str) -> AsyncGenerator[tuple[str, ServerState]]:
    """Run a swarm server whose engine is ready, and yield its address and its state."""
    app = server_app(ServerConfig("fake", folder / "server"))
    swarm: ServerState = app.state.server
    swarm.job = TrainJob(num_repeat=2)
    swarm.engine.move(EngineStatus.BOOTING, 0.0)
    await swarm.connect(Endpoint(None, engine, "fake", 4096))
    swarm.engine.move(EngineStatus.ROLLING, 0.0)
    try:
        async with listening(app) as url:
            yield url, swarm
    finally:
        await swarm.close()


@contextlib.asynccontextmanager
async def proxy_over(
    folder: Path, server: str, hooks: Path | None = None, **more: Any
) -> AsyncGenerator[str]:
    """Run a proxy, and yield its address when it has reached its server.

    With hooks every request has two siblings. `more` are sections of the proxy's configuration.
    """
    (folder / "proxy").mkdir(exist_ok=True)
    sections: Any = {
        "proxy": {"run_dir": folder / "proxy"},
        "swarm": {"url": server},
        "job": {"num_repeat": 2},
        "hooks": {"path": hooks},
        **more,
    }
    async with (
        open_proxy(Config.model_validate(sections)) as parts,
        listening(proxy_app(parts)) as url,
    ):
        await parts.link.reached.wait()
        yield url


def client_of_paused_loop(**more: Any) -> aiohttp.ClientSession:
    """Return a client that opens a connection for each request.

    The event loop of these tests stands still between two requests. After a long pause, a server
    in the same loop would close a kept connection in the moment in which the client uses it.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), **more)


@contextlib.asynccontextmanager
async def running(folder: Path, hooks: Path | None = None, **more: Any) -> AsyncGenerator[Stack]:
    """Run fake engine, server and proxy. `more` are sections of the proxy's configuration."""
    engine = engine_app(FakeEngine(max_model_len=4096), FakeEngine(), PreparationThreads())
    async with (
        listening(engine) as engine_url,
        swarm_over(folder, engine_url) as (server_url, swarm),
        proxy_over(folder, server_url, hooks, **more) as proxy_url,
        client_of_paused_loop(skip_auto_headers=["Content-Type"]) as http,
    ):
        yield Stack(http, engine_url, server_url, proxy_url, swarm)
