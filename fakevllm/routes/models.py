"""GET /v1/models: the engine's own card, and one for each alias."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response

from fakevllm.proxy import Proxy
from fakevllm.routes.passthrough import relayed


def router(proxy: Proxy) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        listing = await relayed(proxy, "GET", "/v1/models", b"", {})
        aliases = [alias for alias in proxy.config.models.aliases if alias != "*"]
        if listing.status_code != 200 or not aliases:
            return listing
        named = _with_aliases(bytes(listing.body), aliases)
        return Response(named, media_type="application/json")

    return routes


def _with_aliases(body: bytes, aliases: list[str]) -> bytes:
    listing: dict[str, Any] = orjson.loads(body)
    cards: list[dict[str, Any]] = listing["data"]
    listing["data"] = [*cards, *(cards[0] | {"id": alias} for alias in aliases)]
    return orjson.dumps(listing)
