"""GET /metrics: the engine's own, then ours."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from fakevllm.proxy import Proxy
from fakevllm.routes.passthrough import relayed


def router(proxy: Proxy) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics() -> Response:
        engine = await relayed(proxy, "GET", "/metrics", b"", {})
        theirs = bytes(engine.body) if engine.status_code == 200 else b""
        if theirs and not theirs.endswith(b"\n"):
            theirs += b"\n"
        return Response(theirs + proxy.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
