"""vLLM's public routes over a TokenEngine."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.http.asgi import Headers, Receive, reason_headers, wait_for_disconnect
from fakevllm_adapters.protocol.errors import WireError, bad_content_type, internal_error
from fakevllm_adapters.vllm_compat.chat_request import parse_chat_request
from fakevllm_adapters.vllm_compat.chat_response import model_card
from fakevllm_adapters.vllm_compat.completions import parse_completion_request
from fakevllm_server.backends.http.completion import Completion
from fakevllm_server.backends.http.engine_metrics import MeasuredEngine
from fakevllm_server.backends.http.text_completion import TextCompletion
from fakevllm_server.backends.http.tokenization import detokenize, tokenize
from fakevllm_server.types.backend import TokenEngine

Json = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]
VERSION = "0.33.0+fakevllm"


class Sampled(Protocol):
    """A request that is being answered, whatever its format."""

    async def answer(self) -> Json: ...
    def chunks(self) -> AsyncGenerator[Json]: ...


class PublicRoutes:
    def __init__(self, engine: TokenEngine) -> None:
        self._engine = MeasuredEngine(engine)

    def routes(self) -> list[Route]:
        return [
            get_route("/version", self.version),
            get_route("/v1/models", self.models),
            get_route("/load", self.load),
            get_route("/metrics", self.metrics),
            get_route("/ping", self.ping, "POST"),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
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

    async def load(self, request: Request) -> Response:
        # A vLLM counts here only with --enable-server-load-tracking.
        return _json({"server_load": 0})

    async def metrics(self, request: Request) -> Response:
        return Response(self._engine.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def ping(self, request: Request) -> Response:
        return Response()

    async def chat(self, request: Request) -> Response:
        async def answered() -> Response:
            body = parse_chat_request(await _body(request))
            completion = Completion(self._engine, body, request.headers.get("x-request-id"))
            return await _sampled(request, completion, is_streamed=bool(body.stream))

        return await _or_error(answered())

    async def completions(self, request: Request) -> Response:
        async def answered() -> Response:
            body = parse_completion_request(await _body(request))
            completion = TextCompletion(self._engine, body, request.headers.get("x-request-id"))
            return await _sampled(request, completion, is_streamed=bool(body.common.stream))

        return await _or_error(answered())

    async def tokenize(self, request: Request) -> Response:
        async def answered() -> Response:
            return _json(tokenize(self._engine, await _body(request)))

        return await _or_error(answered())

    async def detokenize(self, request: Request) -> Response:
        async def answered() -> Response:
            return _json(detokenize(self._engine, await _body(request)))

        return await _or_error(answered())


def get_route(path: str, endpoint: Endpoint, *more: str) -> Route:
    """vLLM's routes take no HEAD, which Starlette adds to every GET."""
    route = Route(path, endpoint, methods=["GET", *more])
    assert route.methods is not None
    route.methods.discard("HEAD")
    return route


async def _body(request: Request) -> bytes:
    if "json" not in request.headers.get("content-type", "json"):
        raise bad_content_type()
    return await request.body()


async def _or_error(answered: Awaitable[Response]) -> Response:
    try:
        return await answered
    except WireError as error:
        return _json(error.body, error.status, reason_headers(error.reason))
    except Exception:
        traceback.print_exc()
        error = internal_error()
        return _json(error.body, error.status)


async def _sampled(request: Request, sampled: Sampled, *, is_streamed: bool) -> Response:
    if is_streamed:
        return StreamingResponse(_events(sampled), media_type="text/event-stream")
    return _json(await _unless_disconnected(request.receive, sampled.answer()))


async def _events(sampled: Sampled) -> AsyncIterator[bytes]:
    try:
        async with aclosing(sampled.chunks()) as chunks:
            async for chunk in chunks:
                yield encode(chunk)
    except Exception as failure:  # the status is out: an error can only go into the stream
        traceback.print_exc()
        error = failure if isinstance(failure, WireError) else internal_error()
        yield encode(error.body)
    yield DONE


async def _unless_disconnected(receive: Receive, work: Awaitable[Json]) -> Json:
    """The result of `work`, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else {}
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _json(value: object, status: int = 200, headers: Headers | None = None) -> Response:
    response = Response(orjson.dumps(value), status, media_type="application/json")
    response.raw_headers += headers or []
    return response
