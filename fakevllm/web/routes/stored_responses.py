"""Routes that retrieve, delete and cancel a stored response of the Responses API. A request may use
these routes only with the API key for which the response was made."""

from __future__ import annotations

import asyncio
import time

import orjson
from fastapi import APIRouter, Request, Response

from fakevllm.ledger.records import StoredResponse
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm.web.routes.inference import FLUSH_S
from fakevllm.web.routes.passthrough import (
    error_response,
    fetch_when_ready,
    relay_to_engine,
)
from fakevllm_adapters.formats.responses.refusals import not_cancellable, unknown_response
from fakevllm_adapters.formats.responses.stored import check_query, deletion, refuse_stream
from fakevllm_adapters.http.asgi import ClientDisconnected, engine_headers, header_map, read_body
from fakevllm_adapters.http.passthrough import path_with_query
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.keys import fingerprint

_NOT_DELETED = "The deletion cannot be written to the ledger now. Try again later."
_PATH = "/v1/responses/{response_id}"


def router(proxy: ProxyComponents) -> APIRouter:
    """Return the routes that retrieve, delete and cancel stored responses of the Responses API."""
    routes = APIRouter()
    handlers = StoredResponseHandlers(proxy)
    # GET is first, because a 405 names the first method of a path, which is vLLM's only one.
    routes.add_api_route(_PATH, handlers.retrieve, methods=["GET"])
    routes.add_api_route(_PATH, handlers.delete, methods=["DELETE"])
    routes.add_api_route(f"{_PATH}/cancel", handlers.cancel, methods=["POST"])
    return routes


class StoredResponseHandlers:
    """The handlers of the requests that retrieve, delete or cancel a stored response."""

    def __init__(self, proxy: ProxyComponents) -> None:
        self._proxy = proxy

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Return a stored response. Only the API key that made the response may do this."""
        try:
            query = request.scope["query_string"]
            stored = await self._find(request, response_id)
            if stored is not None and stored.body is None:
                return await self._relay(request)
            check_query(query)  # vLLM checks the query before it looks for the response
            if stored is None or stored.body is None:
                raise unknown_response(response_id)
            refuse_stream(query, response_id)
            return Response(stored.body, media_type="application/json")
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()  # the client has disconnected

    async def delete(self, request: Request, response_id: str) -> Response:
        """Delete a stored response. Only the API key that made the response may do this."""
        try:
            stored = await self._find(request, response_id, with_unstored=True)
            if stored is None:
                raise unknown_response(response_id)
            receipt = self._proxy.ledger.responses.delete(stored, time.time())
            if not await self._proxy.ledger.is_written(receipt, timeout_s=FLUSH_S):
                raise unavailable(_NOT_DELETED)
        except WireError as error:
            return error_response(error)
        if stored.group_id is not None:
            self._proxy.resends.forget(stored.group_id)
        return Response(orjson.dumps(deletion(response_id)), media_type="application/json")

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Cancel a stored response. Only the API key that made the response may do this."""
        try:
            stored = await self._find(request, response_id)
            if stored is None:
                raise unknown_response(response_id)
            if stored.body is None:
                return await self._relay(request)
            raise not_cancellable()
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()  # the client has disconnected

    async def _find(
        self, request: Request, response_id: str, *, with_unstored: bool = False
    ) -> StoredResponse | None:
        """Return the response with this id, if it was made for the API key of the request. Return
        None otherwise.

        If `with_unstored` is True, the method also finds answers to requests with `store: false`. A
        later request may refer to such an answer by `previous_response_id`.
        """
        key = api_key_of(header_map(request.scope))
        app_key = fingerprint(key) if key else None
        ledger = self._proxy.ledger
        await ledger.flush(FLUSH_S)
        stored = await asyncio.to_thread(ledger.responses.find, response_id, app_key)
        if stored is None and with_unstored:
            answered = await asyncio.to_thread(ledger.answered_request, response_id, app_key)
            if answered is not None:
                group_id = answered.group_id
                stored = StoredResponse(response_id, app_key, group_id, time.time(), None)
        return stored

    async def _relay(self, request: Request) -> Response:
        """Relay the request to the engine, because the engine's own route made the response and
        stores it."""
        proxy, scope = self._proxy, request.scope
        body = await read_body(request.receive, proxy.config.limits.body_bytes)
        path = path_with_query(scope["path"], scope["query_string"])
        headers = engine_headers(header_map(scope))

        async def attempt() -> Response:
            return await relay_to_engine(proxy, request.method, path, body, headers)

        return await fetch_when_ready(proxy, request, attempt)
