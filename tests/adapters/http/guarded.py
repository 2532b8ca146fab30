"""A guard with and without keys, and an app and a client to use behind it."""

from __future__ import annotations

from typing import Any

import httpx

from fakevllm_adapters.http.access_guard import Guard
from fakevllm_adapters.http.asgi import (
    AsgiApp,
    Receive,
    Scope,
    Send,
    read_body,
    send_json,
)
from fakevllm_adapters.protocol.keys import KeyRing

OPEN = Guard()
KEYED = Guard(KeyRing(["sk-one"]))


def client_of(app: AsgiApp, **defaults: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)  # pyright: ignore[reportArgumentType]
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", **defaults)


async def echo_app(scope: Scope, receive: Receive, send: Send) -> None:
    body = await read_body(receive)
    await send_json(send, 200, {"path": scope["path"], "bytes": len(body)})
