"""Relay requests other than model calls, such as /tokenize, to the engine. Only paths on an
allow-list are relayed.

While the engine boots, requests for these routes wait, in the same way as model calls. Requests for
health, metrics and load are answered at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from fakevllm.runtime.disconnect import CancelOnDisconnect
from fakevllm.transport.relay import raise_outage
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm_adapters.http.asgi import (
    ClientDisconnected,
    engine_headers,
    header_map,
    read_body,
)
from fakevllm_adapters.http.client_body import CheckedBody, check_body, rewrite_body
from fakevllm_adapters.http.model_cards import (
    MODEL_CARD_PATHS,
    MODELS_PATH,
    card_in,
    model_id_of,
)
from fakevllm_adapters.http.passthrough import NEVER_WAIT, PASSTHROUGH, path_with_query
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.policy_names import is_policy_name


def router(proxy: ProxyComponents) -> APIRouter:
    """Return the routes of all paths on the allow-list, and the routes /health, /v1/models and
    /metrics."""
    routes = APIRouter()
    for part in (_health_route(proxy), _models_route(proxy), _metrics_route(proxy)):
        routes.include_router(part)

    async def relay(request: Request) -> Response:
        headers = header_map(request.scope)
        limits = proxy.config.limits
        try:
            raw = await read_body(request.receive, limits.body_bytes)
            checked = check_body(raw, limits.per_request, allowed=limits.allowed_fields)
            path = path_with_query(request.scope["path"], request.scope["query_string"])

            async def attempt() -> Response:
                body = _with_served_name(proxy, checked)
                return await relay_to_engine(
                    proxy, request.method, path, body, engine_headers(headers)
                )

            return await fetch_when_ready(proxy, request, attempt)
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()  # the client has disconnected

    for path, methods in PASSTHROUGH.items():
        for method in methods:
            # One route per method, as in vLLM, whose 405 names only the first method of a path.
            routes.add_api_route(path, relay, methods=[method])
    return routes


async def fetch_when_ready(
    proxy: ProxyComponents, request: Request, attempt: Callable[[], Awaitable[Response]]
) -> Response:
    """Call `attempt`, which sends the request to the engine, and return the response. While the
    engine is unavailable, retry as for a model call. Do not retry if the request's path is in
    NEVER_WAIT.

    Raises WireError if the engine stays unavailable. Raises ClientDisconnected if the client
    disconnects.
    """
    async with CancelOnDisconnect(request.receive):
        if request.scope["path"] in NEVER_WAIT:
            return await attempt()
        return await proxy.retry_handler.fetch(attempt, header_map(request.scope))


async def relay_to_engine(
    proxy: ProxyComponents, method: str, path: str, body: bytes, headers: dict[str, str]
) -> Response:
    """Send a request to the engine and return the engine's complete response. Raises WireError if
    the engine is unavailable."""
    async with proxy.upstream.live(method, path, body, headers) as live:
        await raise_outage(live)
        content = await live.read()
    response = Response(content, live.status)
    response.raw_headers = [*live.headers, (b"content-length", b"%d" % len(content))]
    return response


def _with_served_name(proxy: ProxyComponents, checked: CheckedBody) -> bytes:
    """Return the request body, with the served model's name in place of an alias. Raises WireError
    (503) if the server has not reported its model yet."""
    model = checked.body.get("model") if checked.body is not None else None
    served = proxy.model_names.served_name(model) if isinstance(model, str) else None
    return checked.raw if served is None else rewrite_body(checked.raw, model=served)


def error_response(error: WireError) -> Response:
    """Return the error as an HTTP response. If the error contains a number of seconds to wait
    before a retry, the response has a `Retry-After` header."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(orjson.dumps(error.body), error.status, headers, "application/json")


def _models_route(proxy: ProxyComponents) -> APIRouter:
    """Return the routes GET /v1/models and GET /v1/models/ID. They list the engine's own model, and
    each alias as a further model. They leave out policies (versions that the engine holds
    beside the served weights)."""
    routes = APIRouter()

    async def attempt() -> Response:
        return await relay_to_engine(proxy, "GET", MODELS_PATH, b"", {})

    async def engine_listing(request: Request) -> Response:
        try:
            return await fetch_when_ready(proxy, request, attempt)
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response(status_code=499)  # nobody receives this response

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        """List the models that apps may request."""
        listing = await engine_listing(request)
        if listing.status_code != 200:
            return listing
        aliases = [alias for alias in proxy.config.models.aliases if alias != "*"]
        content = _with_aliases(_without_policies(bytes(listing.body)), aliases)
        return Response(content, media_type="application/json")

    async def model(request: Request) -> Response:
        """Return the card of one model."""
        listing = await engine_listing(request)
        if listing.status_code != 200:
            return listing
        model_id = model_id_of(request.scope["path"])
        content = _without_policies(bytes(listing.body))
        if proxy.model_names.is_alias(model_id):
            content = _with_aliases(content, [model_id])
        try:
            return Response(card_in(content, model_id), media_type="application/json")
        except WireError as error:
            return error_response(error)

    for path in MODEL_CARD_PATHS:
        routes.add_api_route(path, model, methods=["GET"])
    return routes


def _without_policies(body: bytes) -> bytes:
    """Return the engine's list of models without policies (versions that the engine holds beside
    the served weights). The first model is the served model. The served model stays in the list,
    even if its name looks like a policy's name. If there are no policies, the list is returned
    unchanged."""
    listing: dict[str, Any] = orjson.loads(body)
    cards: list[dict[str, Any]] = listing.get("data") or []  # an engine elsewhere may send no list
    shown = [*cards[:1], *(card for card in cards[1:] if not is_policy_name(str(card["id"])))]
    return body if len(shown) == len(cards) else orjson.dumps(listing | {"data": shown})


def _with_aliases(body: bytes, aliases: list[str]) -> bytes:
    if not aliases:
        return body
    listing: dict[str, Any] = orjson.loads(body)
    cards: list[dict[str, Any]] = listing["data"]
    listing["data"] = [*cards, *(cards[0] | {"id": alias} for alias in aliases)]
    return orjson.dumps(listing)


def _health_route(proxy: ProxyComponents) -> APIRouter:
    """Return the route GET /health, which answers like vLLM: an empty 200, or 503 while the engine
    cannot generate."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        """Reply with status 200 while answers can be generated, otherwise with 503."""
        return Response(status_code=200 if proxy.link.is_serving else 503)

    return routes


def _metrics_route(proxy: ProxyComponents) -> APIRouter:
    """Return the route GET /metrics, which sends the engine's metrics followed by the proxy's
    metrics."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics of the proxy and of the engine for Prometheus."""
        try:
            engine = await relay_to_engine(proxy, "GET", "/metrics", b"", {})
            engine_metrics = bytes(engine.body) if engine.status_code == 200 else b""
        # Isolated: the proxy has metrics of its own, also while the engine is unavailable.
        except WireError:
            engine_metrics = b""
        if engine_metrics and not engine_metrics.endswith(b"\n"):
            engine_metrics += b"\n"
        return Response(engine_metrics + proxy.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
