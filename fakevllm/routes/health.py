"""GET /health as vLLM answers it: an empty 200, or 503 while nothing can be generated."""

from __future__ import annotations

from fastapi import APIRouter, Response

from fakevllm.proxy import Proxy


def router(proxy: Proxy) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if proxy.link.is_serving else 503)

    return routes
