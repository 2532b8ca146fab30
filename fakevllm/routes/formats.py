"""The door of a wire format: decode, find the task, hand over to the runner."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import orjson

from fakevllm.conversation.hints import hints_of
from fakevllm.conversation.visit import Visit
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
            request = await _decode(proxy, adapter, found, headers, app_key)
        except WireError as error:
            worded = adapter.refusal(error.status, error.body)
            return await send_error(send, replace(error, body=worded))
        except ClientLeft:
            return
        task = proxy.tasks.find(key, adapter.opening(request.body)) or Task(
            main_query=adapter.question(request.body)
        )
        received_at = time.time()
        visit = Visit(
            proxy.conversations,
            request.id,
            app_key or "",
            request.body,
            "" if "messages" in request.body else adapter.question(request.body),
            hints_of(headers, found.body),
            received_at,
            len(raw),
        )
        request = replace(request, ruling=proxy.traffic.ruling(request, visit, key, app_key))
        draft = GroupDraft(request, task, app_key, visit=visit, received_at=received_at)
        await proxy.runner.handle(request, draft, receive, send)

    return app


async def _decode(
    proxy: Proxy,
    adapter: Adapter,
    found: Admitted,
    apps_headers: dict[bytes, bytes],
    app_key: str | None,
) -> Request:
    raw, body, headers = found.raw, found.body, engine_headers(apps_headers)
    if found.removed:
        log.info("taken out of a request: %s", ", ".join(found.removed))
    model: object = body.get("model") if body is not None else None
    named = model if isinstance(model, str) else ""
    served = proxy.served_name(named)
    if body is not None and served is not None:
        body["model"] = served
        raw = rewritten(raw, model=served)
    asked, exchange, reason = raw, None, None
    if body is None:
        reason = "invalid_json"
    else:
        try:
            earlier = await _earlier(proxy, adapter, body, app_key)
            opened = adapter.open(body, proxy.link.engine, earlier)
            is_same = adapter.path == adapter.upstream_path
            asked, exchange = raw if is_same else orjson.dumps(opened.body), opened
        except (Untranslated, TypeError) as why:  # TypeError: numbers beyond 64 bits
            reason = f"not_translated: {why}"
    return Request(
        new_id(),
        adapter,
        raw,
        asked,
        exchange,
        headers,
        reason,
        model=named,
        apps_headers=apps_headers,
    )


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
