"""The door of a wire format: decode, find the task, hand over to the runner."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial

import orjson

from fakevllm.groups.record import GroupDraft
from fakevllm.groups.resend_cache import identity_of
from fakevllm.ledger.prior_answers import prior_exchanges
from fakevllm.sessions.hints import Hints, hints_of
from fakevllm.sessions.placement import Placement
from fakevllm.transport.request import Request
from fakevllm.web.components import ProxyComponents
from fakevllm_adapters.formats.base import Adapter, History, Json, NotTranslated
from fakevllm_adapters.http.asgi import (
    AsgiApp,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    engine_headers,
    header_map,
    read_body,
    send_error,
)
from fakevllm_adapters.http.client_body import CheckedBody, check_body, rewrite_body
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.keys import fingerprint, new_id
from fakevllm_adapters.protocol.swarm import Task

log = logging.getLogger("fakevllm.requests")

FLUSH_S = 2.0
"""The answer that a request names may have been given an instant ago."""


def create_endpoint(proxy: ProxyComponents, adapter: Adapter) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = header_map(scope)
        limits = proxy.config.limits
        key = api_key_of(headers)
        app_key = fingerprint(key) if key else None
        try:
            raw = await read_body(receive, limits.body_bytes)
            found = check_body(
                raw, limits.per_request, proxy.config.max_siblings, limits.allowed_fields
            )
            request = await _decode(proxy, adapter, found, headers, app_key)
        except WireError as error:
            worded = adapter.refusal(error.status, error.body)
            return await send_error(send, replace(error, body=worded))
        except ClientDisconnected:
            return
        hints = hints_of(headers, found.body)
        pipeline, resends, identity = proxy.pipeline, proxy.resends, None
        if resends.is_on:
            identity = identity_of(adapter.path, app_key or "", raw, hints, headers)
            entry = resends.find(identity, scope)
            if entry is not None and await pipeline.answer_resend(request, entry, receive, send):
                return
        draft = _draft(proxy, request, hints, key, app_key, len(raw))
        if identity is not None:
            draft.attempt = resends.begin(identity, request.id, scope)
        await pipeline.handle(draft, receive, send)

    return app


def _draft(
    proxy: ProxyComponents,
    request: Request,
    hints: Hints,
    key: str | None,
    app_key: str | None,
    size: int,
) -> GroupDraft:
    """With its ruling, its task, and what will tell its place."""
    question, received_at = request.adapter.question(request.body), time.time()
    prompt = "" if "messages" in request.body else question
    scope = app_key or ""
    placement = Placement(
        proxy.conversations, request.id, scope, request.body, prompt, hints, received_at, size
    )
    request.ruling = proxy.traffic_gate.ruling(request, placement, key, app_key)
    opening = request.adapter.opening(request.body)
    task = proxy.tasks.find(key, opening) or Task(main_query=question)
    return GroupDraft(
        request,
        task,
        question,
        app_key,
        placement=placement,
        on_answer_id=proxy.delivery.register_answer,
        received_at=received_at,
    )


async def _decode(
    proxy: ProxyComponents,
    adapter: Adapter,
    found: CheckedBody,
    app_headers: dict[bytes, bytes],
    app_key: str | None,
) -> Request:
    raw, body, headers = found.raw, found.body, engine_headers(app_headers)
    if found.removed:
        log.info("taken out of a request: %s", ", ".join(found.removed))
    model: object = body.get("model") if body is not None else None
    named = model if isinstance(model, str) else ""
    served = proxy.model_names.known_name(named)
    if body is not None and served is not None:
        body["model"] = served
        raw = rewrite_body(raw, model=served)
    asked, exchange, reason = raw, None, None
    if body is None:
        reason = "invalid_json"
    else:
        try:
            earlier = await _prior_history(proxy, adapter, body, app_key)
            opened = adapter.open(body, proxy.link.engine, earlier)
            is_same = adapter.path == adapter.upstream_path
            asked, exchange = raw if is_same else orjson.dumps(opened.body), opened
        except (NotTranslated, TypeError) as why:  # TypeError: numbers beyond 64 bits
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
        app_headers=app_headers,
    )


async def _prior_history(
    proxy: ProxyComponents, adapter: Adapter, body: Json, app_key: str | None
) -> History | None:
    """The requests and answers a body only names; None where it names none, or one that this app
    never got."""
    if not adapter.has_previous_response or not isinstance(body.get("previous_response_id"), str):
        return None
    await proxy.ledger.flush(FLUSH_S)
    answered = partial(proxy.ledger.answered_request, app_key=app_key)
    return await asyncio.to_thread(prior_exchanges, adapter, body, answered)
