"""Endpoint for the model calls of one API format. The endpoint decodes a request, and finds the
dataset task to which the request belongs. Then it passes the request and the task to the pipeline,
which samples answers and responds to the app."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial

import orjson

from fakevllm.admission.admission_rules import ServeOnly, ServeOnlyReason
from fakevllm.errors import LedgerError
from fakevllm.groups.group_record import GroupDraft
from fakevllm.groups.resend_cache import identity_of
from fakevllm.ledger.conversation_history import prior_exchanges
from fakevllm.ledger.records import StoredResponse
from fakevllm.sessions.client_session_ids import Hints, hints_of
from fakevllm.sessions.request_placement import Placement
from fakevllm.tracing.request_trace import RequestTrace
from fakevllm.tracing.tracing import Tracing
from fakevllm.transport.request import Request
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm_adapters.formats.base import Adapter, Exchange, History, Json, NotTranslated
from fakevllm_adapters.formats.model_name import RenamingExchange
from fakevllm_adapters.formats.responses.adapter import ResponsesExchange
from fakevllm_adapters.formats.responses.refusals import unknown_response
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
from fakevllm_adapters.http.response_ids import (
    chooses_response_id,
    previous_response_id_of,
    watch_response_id,
)
from fakevllm_adapters.privacy.store_header import stores_nothing
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.keys import fingerprint, new_id
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_runtime.body_search import finds_in_body

log = logging.getLogger("fakevllm.requests")

FLUSH_S = 2.0
"""Maximum number of seconds to wait for pending writes to the ledger before an earlier answer is
looked up in the ledger. A request may refer to an answer that was sent a moment ago."""
JOB_WAIT_S = 3.0
"""Maximum number of seconds for which the first requests of a proxy with redaction wait until the
server has the proxy's job. A request that comes earlier could not be trained."""


def create_endpoint(proxy: ProxyComponents, adapter: Adapter) -> AsgiApp:
    """Return the ASGI endpoint for the model calls of one API format."""

    pipeline, resends = proxy.pipeline, proxy.resends

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = header_map(scope)
        limits = proxy.config.limits
        key = api_key_of(headers)
        app_key = fingerprint(key) if key else None
        try:
            is_stored = not (stores_nothing(headers) or proxy.tasks.stores_nothing(key))
            is_stored = is_stored and proxy.redaction.is_complete
            raw = await read_body(receive, limits.body_bytes)
            checked = check_body(
                raw, limits.per_request, proxy.config.max_siblings, limits.allowed_fields
            )
            if not is_stored:
                checked = _unstored(adapter, checked)
            request = await _decode(proxy, adapter, checked, headers, app_key, is_stored=is_stored)
            hints, identity = _hidden_names(proxy, hints_of(headers, checked.body)), None
            if resends.is_on and is_stored:
                identity = identity_of(adapter.path, app_key or "", raw, hints, headers)
                resends.check_idempotency_key(identity)
        except WireError as error:
            error_body = adapter.refusal(error.status, error.body)
            return await send_error(send, replace(error, body=error_body))
        except ClientDisconnected:
            return
        if proxy.tracing is not None and is_stored:
            request.trace = _begin_trace(proxy.tracing, request)
        if identity is not None:
            entry = resends.find(identity, scope)
            if entry is not None and await pipeline.answer_resend(request, entry, receive, send):
                return
        if is_stored:
            await proxy.link.until_server_redacts(JOB_WAIT_S)
            request.is_redacted = await finds_in_body(proxy.redaction.redactor, request.raw)
            draft = _draft(proxy, request, hints, key, app_key, len(raw))
        else:
            draft = _unstored_draft(proxy, request, key, app_key)
        if identity is not None:
            draft.attempt = resends.begin(identity, request.id, scope)
        if (
            is_stored
            and adapter.has_previous_response
            and not chooses_response_id(raw, checked.body)
        ):
            on_id = partial(_store_native_response, proxy, request, app_key)
            send = watch_response_id(send, on_id)
        await pipeline.handle(draft, receive, send)

    return app


def _begin_trace(tracing: Tracing, request: Request) -> RequestTrace:
    is_text_completion = request.adapter.name == "completions"
    return tracing.begin(
        request.model, request.body, request.app_headers, is_text_completion=is_text_completion
    )


def _hidden_names(proxy: ProxyComponents, hints: Hints) -> Hints:
    """If redaction is on, replace each session name in `hints` that has text to redact by a keyed
    hash. Without this replacement, the id of a session would be a hash without a key, from which
    the name could be guessed."""
    if not proxy.redaction.redactor or not (hints.session or hints.parent):
        return hints
    hide = proxy.ledger.hidden_id
    session = None if hints.session is None else hide(hints.session)
    parent = None if hints.parent is None else hide(hints.parent)
    return replace(hints, session=session, parent=parent)


def _unstored(adapter: Adapter, checked: CheckedBody) -> CheckedBody:
    """Return the body of a request of which nothing may be stored. If the engine could store the
    answer, the returned body tells the engine not to store it."""
    if not adapter.has_previous_response or checked.body is None:
        return checked
    body = checked.body | {"store": False}
    return replace(checked, raw=rewrite_body(checked.raw, store=False), body=body)


def _unstored_draft(
    proxy: ProxyComponents, request: Request, key: str | None, app_key: str | None
) -> GroupDraft:
    """Return the GroupDraft of a request that is not stored. Only one answer is sampled. The
    request has no session, and no feedback about its answer is accepted."""
    question = request.adapter.question(request.body)
    opening = request.adapter.opening(request.body)
    task = proxy.tasks.find(key, opening) or Task(main_query=question)
    request.ruling = ServeOnly(ServeOnlyReason.NOT_STORED)
    return GroupDraft(request, task, question, app_key)


def _draft(
    proxy: ProxyComponents,
    request: Request,
    hints: Hints,
    key: str | None,
    app_key: str | None,
    size: int,
) -> GroupDraft:
    """Return a new GroupDraft, which collects what the ledger (the proxy's database) will record
    about the request and its answers. At first, the draft contains the request's task and the
    request's place in the conversation. This function also decides whether the request is trained,
    and stores the decision in `request.ruling`.

    `key` is the app's API key, `app_key` is the key's fingerprint, and `size` is the length of the
    body in bytes.
    """
    question = request.adapter.question(request.body)
    prompt = "" if "messages" in request.body else question
    scope = app_key or ""
    placement = Placement(
        proxy.conversations, request.id, scope, request.body, prompt, hints, time.monotonic(), size
    )
    opening = request.adapter.opening(request.body)
    task = proxy.tasks.find(key, opening) or Task(main_query=question)
    texts = (opening, question, task.main_query)
    request.ruling = proxy.traffic_gate.ruling(request, placement, key, texts)
    # A request that is not trained anyway keeps its own reason: a side call must stay one.
    if not proxy.link.server_redacts and not isinstance(request.ruling, ServeOnly):
        request.ruling = ServeOnly(ServeOnlyReason.SERVER_DOES_NOT_REDACT)
    return GroupDraft(
        request,
        task,
        question,
        app_key,
        placement=placement,
        on_answer_id=proxy.delivery.register_answer,
        received_at=time.time(),
    )


async def _decode(
    proxy: ProxyComponents,
    adapter: Adapter,
    checked: CheckedBody,
    app_headers: dict[bytes, bytes],
    app_key: str | None,
    *,
    is_stored: bool,
) -> Request:
    """Return the decoded request. Its field `exchange` is the parsed body. The field is None if the
    body is not valid JSON, or if the body cannot be translated into the engine's format.

    Raises WireError in two cases:

    * The request names a policy (weights that only evaluations may sample by name).
    * The request continues a response that only the ledger has, and the request cannot be
      translated. Such a request must not be relayed to the engine. The engine may have a response
      of another key with the same id.
    """
    raw, body = checked.raw, checked.body
    if checked.removed:
        log.info("removed fields from a request: %s", ", ".join(checked.removed))
    model: object = body.get("model") if body is not None else None
    requested_model = model if isinstance(model, str) else ""
    proxy.model_names.refuse_policy(requested_model)
    alias = requested_model if proxy.model_names.is_alias(requested_model) else None
    served_model = None if alias is None else proxy.link.model
    request_id = new_id()
    if body is not None and served_model is not None:
        body["model"] = served_model
        raw = rewrite_body(raw, model=served_model)
    upstream_body, exchange, no_exchange_reason = raw, None, None
    history = await _prior_history(proxy, adapter, checked, app_key)
    if body is None:
        no_exchange_reason = "invalid_json"
    else:
        try:
            exchange = _open_exchange(proxy, adapter, body, history, alias)
            if is_stored:
                _store_response_of(exchange, proxy, request_id, app_key)
            if alias is not None:
                exchange = RenamingExchange(exchange, alias)
            if adapter.path != adapter.upstream_path:
                upstream_body = orjson.dumps(exchange.body)
        except (NotTranslated, TypeError) as error:  # TypeError: numbers of more than 64 bits
            if history is not None:
                refusal = error.error if isinstance(error, NotTranslated) else None
                raise refusal or unknown_response(str(body["previous_response_id"])) from None
            exchange = None
            no_exchange_reason = f"not_translated: {error}"
    return Request(
        request_id,
        adapter,
        raw,
        upstream_body,
        exchange,
        engine_headers(app_headers),
        no_exchange_reason,
        model=requested_model,
        alias=alias,
        app_headers=app_headers,
        has_native_route=history is None,
        is_stored=is_stored,
    )


def _open_exchange(
    proxy: ProxyComponents, adapter: Adapter, body: Json, history: History | None, alias: str | None
) -> Exchange:
    """Parse a request body in the API format of the app. Return the exchange, which translates the
    request for the engine and the response for the app. `alias` is the model name in the request if
    it is an alias of the served model, else None. Raises NotTranslated if the proxy cannot
    translate the body."""
    engine = proxy.link.engine
    named = engine if alias is None else replace(engine, model=alias)
    return adapter.open(body, named, history)


def _store_response_of(
    exchange: Exchange, proxy: ProxyComponents, request_id: str, app_key: str | None
) -> None:
    """If the exchange (the translator of a request and its response) is in the Responses format,
    make it store the complete response in the ledger."""
    if not isinstance(exchange, ResponsesExchange):
        return
    response_id = exchange.response_id

    def store(body: bytes) -> None:
        stored = StoredResponse(response_id, app_key, request_id, time.time(), body)
        proxy.ledger.responses.store(stored)

    exchange.on_response = store


def _store_native_response(
    proxy: ProxyComponents, request: Request, app_key: str | None, response_id: str
) -> None:
    """Record the API key (as a fingerprint) for which the engine's own Responses route has made a
    response. Only the engine stores the response itself. The engine checks no keys, so it would
    send the response to anybody who knows the id."""
    if response_id != request.response_id:
        stored = StoredResponse(response_id, app_key, request.id, time.time(), None)
        proxy.ledger.responses.store(stored)


async def _prior_history(
    proxy: ProxyComponents, adapter: Adapter, checked: CheckedBody, app_key: str | None
) -> History | None:
    """Return the earlier requests and answers of the conversation that a request continues by
    `previous_response_id`.

    Return None if the request continues no answer, or continues an answer that only the engine has.
    Raises WireError (404) in three cases: the answer was deleted, the answer was made for another
    key than `app_key` (a fingerprint), or the conversation is too long. The proxy checks the key,
    because an engine checks no keys and would continue any app's answer.
    """
    if not adapter.has_previous_response:
        return None
    response_id = previous_response_id_of(checked.raw, checked.body)
    if response_id is None:
        return None
    await proxy.ledger.flush(FLUSH_S)
    find_request = partial(proxy.ledger.answered_request, app_key=app_key)
    reference = {"previous_response_id": response_id}
    try:
        with proxy.ledger.reading():
            history = await asyncio.to_thread(prior_exchanges, adapter, reference, find_request)
            stored = None
            if history is None:
                stored = await asyncio.to_thread(proxy.ledger.responses.find, response_id, app_key)
    except LedgerError as error:
        log.error("an earlier response cannot be looked up: %s", error)
        raise unavailable("The earlier response cannot be looked up.") from None
    if history is None and (stored is None or stored.body is not None):
        raise unknown_response(response_id)
    return history
