"""The small routes of an engine, relayed by an allow-list: what it does not name is not there."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from fakevllm.leaving import WhileThere
from fakevllm.proxy import Proxy
from fakevllm_adapters.http.asgi import (
    ClientLeft,
    engine_headers,
    header_map,
    read_body,
)
from fakevllm_adapters.http.limits import admitted, rewritten
from fakevllm_adapters.http.passthrough import PASSTHROUGH, whole_path
from fakevllm_adapters.protocol.errors import WireError


def router(proxy: Proxy) -> APIRouter:
    routes = APIRouter()

    async def relay(request: Request) -> Response:
        headers = engine_headers(header_map(request.scope))
        limits = proxy.config.limits
        try:
            raw = await read_body(request.receive, limits.body_bytes)
            found = admitted(raw, limits.per_request, allowed=limits.allowed_fields)
            path = whole_path(request.scope["path"], request.scope["query_string"])
            body = found.raw
            if found.body is not None and proxy.rename(found.body):
                body = rewritten(body, model=found.body["model"])
            async with WhileThere(request.receive):
                return await relayed(proxy, request.method, path, body, headers)
        except WireError as error:
            return worded(error)
        except ClientLeft:
            return Response()  # to nobody

    for path, methods in PASSTHROUGH.items():
        for method in methods:  # a route each, as vLLM has them: a 405 tells the first
            routes.add_api_route(path, relay, methods=[method])
    return routes


async def relayed(
    proxy: Proxy, method: str, path: str, body: bytes, headers: dict[str, str]
) -> Response:
    """The engine's whole answer, or the error that keeps it away."""
    try:
        async with proxy.upstream.live(method, path, body, headers) as live:
            whole = b"".join([chunk async for chunk in live.chunks])
    except WireError as error:
        return worded(error)
    response = Response(whole, live.status)
    response.raw_headers = [*live.headers, (b"content-length", b"%d" % len(whole))]
    return response


def worded(error: WireError) -> Response:
    retry = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(orjson.dumps(error.body), error.status, retry, "application/json")
