"""GET /v1/models: the engine's own card, and one for each alias."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response

from fakevllm.proxy import Proxy
from fakevllm_adapters.errors import WireError


def router(proxy: Proxy) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        try:
            async with proxy.upstream.live("GET", "/v1/models", b"", {}) as live:
                body = b"".join([chunk async for chunk in live.chunks])
                status = live.status
        except WireError as error:
            headers = {"retry-after": str(error.retry_after_s)}
            return Response(orjson.dumps(error.body), error.status, headers, "application/json")
        if status == 200:
            body = _with_aliases(body, proxy.config.models.aliases)
        return Response(body, status, media_type="application/json")

    return routes


def _with_aliases(body: bytes, aliases: tuple[str, ...]) -> bytes:
    listing: dict[str, Any] = orjson.loads(body)
    cards: list[dict[str, Any]] = listing["data"]
    named = [alias for alias in aliases if alias != "*"]
    listing["data"] = [*cards, *(cards[0] | {"id": alias} for alias in named)]
    return orjson.dumps(listing)
