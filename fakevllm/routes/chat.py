"""The door of a wire format: decode, find the task, hand over to the runner."""

from __future__ import annotations

import orjson

from fakevllm.group import GroupDraft
from fakevllm.proxy import Proxy
from fakevllm.siblings import Request
from fakevllm_adapters.asgi import (
    AsgiApp,
    ClientLeft,
    Receive,
    Scope,
    Send,
    engine_headers,
    header_map,
    json_object,
    key_of,
    read_body,
    send_error,
)
from fakevllm_adapters.base import Adapter, Json
from fakevllm_adapters.errors import WireError
from fakevllm_adapters.keys import fingerprint, new_id
from fakevllm_adapters.swarm import Task


def door(proxy: Proxy, adapter: Adapter) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = header_map(scope)
        try:
            raw = await read_body(receive)
        except WireError as error:
            return await send_error(send, error)
        except ClientLeft:
            return
        body = json_object(raw) or {}
        if _rename(proxy, body):
            raw = orjson.dumps(body)
        request = Request(new_id(), adapter, raw, body, engine_headers(headers))
        key = key_of(headers)
        task = proxy.tasks.find(key, adapter.opening(body)) or Task(
            main_query=adapter.question(body)
        )
        draft = GroupDraft(request, task, fingerprint(key) if key else None)
        await proxy.runner.handle(request, draft, receive, send)

    return app


def _rename(proxy: Proxy, body: Json) -> bool:
    """Put the served model's name for an alias. Returns whether the body changed."""
    asked, served = body.get("model"), proxy.link.model
    aliases = proxy.config.models.aliases
    if not isinstance(asked, str) or served is None or asked == served:
        return False
    if asked not in aliases and "*" not in aliases:
        return False
    body["model"] = served
    return True
