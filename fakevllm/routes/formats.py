"""The door of a wire format: decode, find the task, hand over to the runner."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

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
    key_of,
    read_body,
    send_error,
)
from fakevllm_adapters.base import Adapter, Earlier, Json, Untranslated
from fakevllm_adapters.errors import WireError
from fakevllm_adapters.keys import fingerprint, new_id
from fakevllm_adapters.limits import Admitted, admitted, rewritten
from fakevllm_adapters.swarm import Task

log = logging.getLogger("fakevllm.requests")

FLUSH_S = 2.0
"""The answer that a request names may have been given an instant ago."""
LONGEST_HISTORY = 1000
"""Answers a chain of `previous_response_id` may name."""


def door(proxy: Proxy, adapter: Adapter) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = header_map(scope)
        limits = proxy.config.limits
        key = key_of(headers)
        app_key = fingerprint(key) if key else None
        try:
            raw = await read_body(receive, limits.body_bytes)
            found = admitted(raw, limits.per_request, proxy.num_siblings, limits.allowed_fields)
            request = await _decode(proxy, adapter, found, engine_headers(headers), app_key)
        except WireError as error:
            worded = adapter.refusal(error.status, error.body)
            return await send_error(send, replace(error, body=worded))
        except ClientLeft:
            return
        task = proxy.tasks.find(key, adapter.opening(request.body)) or Task(
            main_query=adapter.question(request.body)
        )
        draft = GroupDraft(request, task, app_key)
        await proxy.runner.handle(request, draft, receive, send)

    return app


async def _decode(
    proxy: Proxy, adapter: Adapter, found: Admitted, headers: dict[str, str], app_key: str | None
) -> Request:
    raw, body = found.raw, found.body
    if found.removed:
        log.info("taken out of a request: %s", ", ".join(found.removed))
    if body is None:
        return Request(new_id(), adapter, raw, raw, None, headers, "invalid_json")
    if proxy.rename(body):
        raw = rewritten(raw, model=body["model"])
    try:
        earlier = await _earlier(proxy, adapter, body, app_key)
        exchange = adapter.open(body, proxy.link.engine, earlier)
        is_same = adapter.path == adapter.upstream_path
        asked = raw if is_same else orjson.dumps(exchange.body)
    except (Untranslated, TypeError) as why:  # TypeError: numbers beyond 64 bits
        return Request(new_id(), adapter, raw, raw, None, headers, f"not_translated: {why}")
    return Request(new_id(), adapter, raw, asked, exchange, headers)


async def _earlier(
    proxy: Proxy, adapter: Adapter, body: Json, app_key: str | None
) -> Earlier | None:
    """The requests and answers a body only names; None where it names none, or one that this app
    never got."""
    name = body.get("previous_response_id")
    earlier: list[tuple[Json, Json]] = []
    if not adapter.names_answers or not isinstance(name, str):
        return None
    await proxy.ledger.flush(FLUSH_S)
    while isinstance(name, str):
        found = await asyncio.to_thread(proxy.ledger.answered, name, app_key)
        if found is None or len(earlier) == LONGEST_HISTORY:
            return None
        asked: Json = orjson.loads(found.request_json)
        earlier.insert(0, (asked, orjson.loads(found.message_json)))
        name = asked.get("previous_response_id")
    return earlier
