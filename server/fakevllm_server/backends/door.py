"""An engine process's door: vLLM's HTTP over a TokenEngine, control routes over a TrainEngine, on
a Unix socket. A trainer alone has the control routes and /health.

Control routes (`/control/…`) are for the server that started the process; the socket's folder
keeps others out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fakevllm_adapters.asgi import Receive, until_disconnect
from fakevllm_adapters.errors import WireError, bad_content_type, internal_error
from fakevllm_adapters.sse import DONE, encode
from fakevllm_adapters.swarm import TrainJob
from fakevllm_adapters.vllm_answer import model_card
from fakevllm_adapters.vllm_chat import parse_chat_request
from fakevllm_server.backends.base import Batch, Call, LossSpec, TokenEngine, TrainEngine
from fakevllm_server.backends.completion import Completion
from fakevllm_server.backends.graceful import GracefulServer
from fakevllm_server.backends.partial_step import PartialStep

Json = dict[str, Any]
VERSION = "0.33.0+fakevllm"


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
    control = Control(engine, trainer)
    routes = [
        Route("/health", _health),
        Route("/control/info", control.info),
        Route("/control/{action}", control.act, methods=["POST"]),
    ]
    return Starlette(routes=routes if engine is None else [*Door(engine).routes(), *routes])


async def _health(request: Request) -> Response:
    return Response()


class Door:
    """vLLM's public routes."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        return [
            Route("/version", self.version),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def models(self, request: Request) -> Response:
        name = self._engine.model_name
        return _json(
            {
                "object": "list",
                "data": [model_card(name, name, int(time.time()), self._engine.max_model_len)],
            }
        )

    async def chat(self, request: Request) -> Response:
        try:
            if "json" not in request.headers.get("content-type", "json"):
                raise bad_content_type()
            body = parse_chat_request(await request.body())
            completion = Completion(self._engine, body, request.headers.get("x-request-id"))
            if body.stream:
                return StreamingResponse(_events(completion), media_type="text/event-stream")
            answer = await _unless_disconnected(request.receive, completion.answer())
            return _json(answer)
        except WireError as error:
            return _json(error.body, error.status)
        except Exception:
            traceback.print_exc()
            error = internal_error()
            return _json(error.body, error.status)


async def _events(completion: Completion) -> AsyncIterator[bytes]:
    try:
        async for chunk in completion.chunks():
            yield encode(chunk)
    except Exception as failure:  # the status is out: an error can only go into the stream
        traceback.print_exc()
        error = failure if isinstance(failure, WireError) else internal_error()
        yield encode(error.body)
    yield DONE


async def _unless_disconnected(receive: Receive, work: Awaitable[Json]) -> Json:
    """The result of `work`, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else {}
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Control:
    """What the server asks of its own engine."""

    def __init__(self, engine: TokenEngine | None, trainer: TrainEngine) -> None:
        self._info: Json = {"model_name": "", "max_model_len": 0, "default_sampling": {}}
        if engine is not None:
            self._info = {name: getattr(engine, name) for name in self._info}
        self._trainer = trainer

    async def info(self, request: Request) -> Response:
        return _json(self._info)

    async def act(self, request: Request) -> Response:
        try:
            body: Json = orjson.loads(await request.body())
            return _json(await self._act(request.path_params["action"], body) or {})
        except Exception as failure:
            traceback.print_exc()
            told: Json = {"error": f"{type(failure).__name__}: {failure}"}
            if isinstance(failure, PartialStep):
                told["is_partial"] = True
            return _json(told, 500)

    async def _act(self, action: str, body: Json) -> Json | None:
        match action:
            case "boot":
                await self._trainer.boot(TrainJob.model_validate(body["job"]))
            case "step":
                calls = [Call.from_wire(call) for call in body["calls"]]
                return dict(
                    await self._trainer.step(Batch(body["step"], calls), LossSpec(**body["loss"]))
                )
            case "publish":
                await self._trainer.publish(body["version"])
            case "load_weights":
                await self._trainer.load_weights(Path(body["folder"]), body["version"])
            case "export":
                await self._trainer.export(Path(body["folder"]))
            case "save":
                await self._trainer.save(Path(body["folder"]))
            case "restore":
                await self._trainer.restore(Path(body["folder"]))
            case _:
                raise ValueError(f"no control action {action!r}")
        return None


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
