"""Routes for model calls in each wire format, and small engine routes whose requests are relayed.

A sibling is one answer to an app's request. A call belongs to a sibling if a header names the
sibling. A call belongs to a claimed episode if its path or its API key names the episode. Calls of
siblings and episodes are captured for training. All other calls are only answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from fakevllm_adapters.formats.base import Adapter, Json
from fakevllm_adapters.formats.responses.refusals import unknown_response
from fakevllm_adapters.http.asgi import (
    AsgiApp,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    engine_headers,
    header_map,
    json_object,
    read_body,
    send_bytes,
    send_error,
    wait_for_disconnect,
)
from fakevllm_adapters.http.client_body import CheckedBody, check_body, rewrite_body
from fakevllm_adapters.http.json_body import MAX_DEPTH, parse_as_vllm
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.http.media_urls import media_refusal
from fakevllm_adapters.http.passthrough import NEVER_WAIT, path_with_query
from fakevllm_adapters.http.response_ids import previous_response_id_of
from fakevllm_adapters.privacy.store_header import NOT_STORED, stores_nothing
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import (
    WireError,
    bad_request,
    unavailable,
    unknown_model,
)
from fakevllm_adapters.protocol.keys import EPISODE_KEY_PREFIX, fingerprint
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.policy_names import is_policy_name, policy_name, version_of_policy
from fakevllm_adapters.protocol.swarm import (
    PROXY_HEADERS,
    SESSION_HEADER,
    SIBLING_HEADER,
    SiblingRange,
    parse_siblings,
)
from fakevllm_server.episodes.episode_registry import Episode, EpisodeRefused
from fakevllm_server.fleet.router import NO_AFFINITY, CallAffinity
from fakevllm_server.rollout.engine_client import EngineClient, EngineFailed
from fakevllm_server.types.weight_versions import CallStamp, GateAbandoned
from fakevllm_server.web.routes.authorization import caller_of, not_found, unclaimed_key
from fakevllm_server.web.routes.model_call_relay import Attempt, ClientCall
from fakevllm_server.web.server_state import ServerState

log = logging.getLogger("fakevllm.server")

LIMITS = Limits()
"""Limits on the body of a call that belongs to an episode."""
_RELAYED_LIMITS = Limits(json_depth=MAX_DEPTH)
"""Limit on the JSON nesting in the body of any other call. This limit is higher than each limit
that the user of a proxy can set. A body with deeper nesting is refused, because vLLM could parse
the body, but this process could not check it."""
_METRICS_PATH = "/metrics"
HOLD_S = 300.0
"""Maximum seconds that a call waits for an engine that is being restarted or given new weights."""
_SIBLING = SIBLING_HEADER.lower().encode()
_SESSION = SESSION_HEADER.lower().encode()
_DIRECT_CALL = (
    "A model call that bypassed the proxy and belongs to no episode was answered, and is not "
    "trained. To train on an app's calls, set its OPENAI_BASE_URL to the proxy (`fakevllm serve`). "
    "This is logged once."
)
_ENGINE_FAILED = "The engine did not answer; it is being started again."


def create_endpoint(state: ServerState, adapter: Adapter | None) -> AsgiApp:
    """Return the ASGI endpoint for calls in the wire format of `adapter`. If `adapter` is None, the
    endpoint relays requests to the engine unchanged."""

    async def answer(scope: Scope, body: bytes, send: Send) -> None:
        if adapter is None:
            await relay_route(state, scope, body, send)
        else:
            await _answer_call(state, scope, adapter, body, send)

    return engine_endpoint(state, answer, adapter)


def engine_endpoint(
    state: ServerState,
    answer: Callable[[Scope, bytes, Send], Awaitable[None]],
    adapter: Adapter | None = None,
) -> AsgiApp:
    """Return an ASGI endpoint that answers requests with the help of the engine.

    The function `answer` sends the answer to a request. If the client disconnects, `answer` is
    cancelled. If `answer` raises WireError or EngineFailed, the client gets an error. If `adapter`
    is set, the error has the adapter's wire format.
    """

    async def refuse(error: WireError, send: Send) -> None:
        if adapter is not None:
            error = replace(error, body=adapter.refusal(error.status, error.body))
        await send_error(send, error, with_reason=True)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            state.attached_engine()
            body = await read_body(receive)
            refusal = _RELAYED_LIMITS.depth_refusal(body)
            if refusal is not None:
                raise refusal
            await _cancel_on_disconnect(receive, answer(scope, body, send))
        except WireError as error:
            await refuse(error, send)
        except ClientDisconnected:
            pass
        except (EngineFailed, TimeoutError):
            await refuse(unavailable(_ENGINE_FAILED, OutageReason.ENGINE_FAILED), send)

    return app


async def relay_route(state: ServerState, scope: Scope, body: bytes, send: Send) -> None:
    """Relay a request for a small route, such as /v1/models, to the engine. While the engine is
    being restarted, the request waits for the engine. Requests for the paths in NEVER_WAIT do not
    wait."""
    headers = header_map(scope)
    path = path_at_engine(state, scope)
    url = path_with_query(path, scope.get("query_string", b""))
    parsed = json_object(body)
    _check_media_urls(state, body, parsed)
    _check_prompt_logprobs(state, body, parsed)

    async def attempt(engine: EngineClient) -> None:
        await engine.relay(scope["method"], url, body, engine_headers(headers), send)

    if path == _METRICS_PATH and state.fleet is not None:
        state.attached_engine()  # refuses the request before the first start has ended
        # Only a fleet needs prometheus_client, which takes long to import.
        from fakevllm_server.fleet.metrics import PAGE_HEADERS, fleet_page

        page = fleet_page(state.replicas, await state.fleet.metrics_pages())
        return await send_bytes(send, 200, page, PAGE_HEADERS)
    if path in NEVER_WAIT:
        return await attempt(await state.serving_replica())
    await attempt_when_serving(state, attempt)


async def attempt_when_serving(
    state: ServerState, attempt: Callable[[EngineClient], Awaitable[None]]
) -> None:
    """Wait until an engine answers calls, and call `attempt` with the EngineClient of this engine.
    If the engine fails before any part of its answer was passed on, wait until an engine answers
    again, and call `attempt` a second time. Raises EngineFailed if the second attempt fails too.
    Raises WireError (503) if no engine answers in time."""
    client = await _wait_until_serving(state)
    try:
        return await attempt(client)
    except EngineFailed:
        failed = client
    await attempt(await _wait_until_serving(state, failed))


async def _wait_until_serving(
    state: ServerState, failed: EngineClient | None = None
) -> EngineClient:
    """Wait until an engine answers calls, and return its EngineClient.

    This function is for small routes, such as /v1/models. Unlike model calls, requests for small
    routes do not wait while new weights are loaded. `failed` is the EngineClient with which an
    earlier attempt of this request failed, or None. Raises WireError (503) after HOLD_S seconds.
    """
    try:
        async with asyncio.timeout(HOLD_S):
            return await state.wait_until_serving(failed)
    except TimeoutError:
        raise _never_ready() from None


def path_at_engine(state: ServerState, scope: Scope) -> str:
    """Return the path with which a request is relayed to the engine. It is the request's own path
    without the prefix `/e/UUID`, which names an episode.

    Raises WireError (404) if the request names an episode that is not claimed.
    """
    _episode_of_call(state, scope, header_map(scope))
    path: str = scope["path"]
    return path.removeprefix(f"/e/{scope['path_params'].get('episode_uuid')}")


def key_fingerprint(headers: dict[bytes, bytes]) -> str:
    """Return the fingerprint of a request's API key; "" if the request has no key."""
    key = api_key_of(headers)
    return fingerprint(key) if key else ""


async def _answer_call(
    state: ServerState, scope: Scope, adapter: Adapter, body: bytes, send: Send
) -> None:
    """Answer a model call. If the call belongs to an episode or to a sibling (an answer to an app's
    request), capture it for training."""
    headers = header_map(scope)
    siblings = _siblings_of_call(headers)
    episode = _episode_of_call(state, scope, headers)
    is_unstored = stores_nothing(headers) or state.config.keys.stores_nothing(api_key_of(headers))
    scope[NOT_STORED] = is_unstored
    if siblings is not None and episode is not None:
        raise bad_request(f"{SIBLING_HEADER} is not allowed with the key of an episode.")
    # The proxy has checked the bodies of its calls by its own limits, which its user can set.
    job = None
    if episode is None:
        checked = CheckedBody(body, json_object(body))
    else:
        job, model = state.job, state.attached_engine().info.model
        checked = _with_model(check_body(body, LIMITS), model)
    policy_version = _policy_version(state, checked.body)
    if policy_version is not None:
        _check_policy(state, policy_version, is_captured=siblings is not None)
    _check_media_urls(state, checked.raw, checked.body)
    _check_prompt_logprobs(state, checked.raw, checked.body)
    store = None
    if adapter.has_previous_response:
        key = key_fingerprint(headers)
        _check_previous_response(state, key, checked)
        store = None if is_unstored else partial(state.responses.store, key)
    call = ClientCall(
        adapter,
        checked.raw,
        checked.body,
        engine_headers(headers),
        send,
        job,
        store,
        reports_version=_is_of_proxy(headers),
        policy_version=policy_version,
        redactor=state.redactor,
    )
    affinity = NO_AFFINITY
    if state.fleet is not None:
        affinity = _affinity(headers, siblings, episode, policy_version)
    if episode is not None:
        is_stored = not is_unstored
        return await _answer_episode_call(state, episode, call, affinity, is_stored=is_stored)
    if is_unstored or siblings is None:
        _log_direct_call(state, headers)
        await _attempt_twice(state, call.relay, affinity)
    else:
        if siblings.num > 1:
            attempt = call.captured_siblings(siblings, state.intake.add_calls)
        else:
            attempt = call.captured(partial(state.intake.add_call, siblings.siblings[0]))
        await _attempt_twice(state, attempt, affinity)


def _affinity(
    headers: dict[bytes, bytes],
    siblings: SiblingRange | None,
    episode: Episode | None,
    policy_version: int | None,
) -> CallAffinity:
    """Return the facts of a call by which a fleet chooses its replica. An episode is a session."""
    session = headers.get(_SESSION, b"").decode("latin-1") or None
    return CallAffinity(
        session if episode is None else episode.episode_id,
        siblings.group_id if siblings else None,
        None if policy_version is None else policy_name(policy_version),
    )


async def _answer_episode_call(
    state: ServerState,
    episode: Episode,
    call: ClientCall,
    affinity: CallAffinity,
    *,
    is_stored: bool,
) -> None:
    """Answer a call of an episode. The call restarts the episode's idle timer, even if the call is
    not stored."""
    now = time.monotonic()
    state.episodes.call_begins(episode, now)
    state.participation.clients.touch(episode.client_uuid, now)
    try:
        # The call is saved before the last byte is sent, because the client may end the episode as
        # soon as it has that byte.
        save = partial(state.intake.add_episode_call, episode)
        attempt = call.captured(save) if is_stored else call.relay
        await _attempt_twice(state, attempt, affinity)
    finally:
        state.episodes.call_ends(episode, time.monotonic())


def _check_media_urls(state: ServerState, raw: bytes, body: Json | None) -> None:
    """Raise WireError (400) if vLLM would fetch a media URL whose host is not allowed.

    If the rollout engine is not vLLM, nothing is checked, because the other engines fetch no URLs.
    They refuse media with the error that vLLM returns for a text model.
    """
    if state.config.rollout_name == "vllm":
        refusal = media_refusal(raw, body, state.config.media_domains)
        if refusal is not None:
            raise refusal


def _check_prompt_logprobs(state: ServerState, raw: bytes, body: Json | None) -> None:
    """Raise WireError (400) if a request asks for log-probabilities of its prompt, and the engine
    is a vLLM with LoRA adapters. The engine of vLLM 0.27 crashes on such a request if other
    requests run at the same time. A chat request that sets `echo` always asks for these
    log-probabilities.

    If `body` is None, `raw` is parsed in the same way as in vLLM, which accepts some bodies that
    orjson refuses.
    """
    client = state.engine_client
    if client is None or not client.endpoint.takes_adapters:
        return
    parsed = body if body is not None else parse_as_vllm(raw)
    if not isinstance(parsed, dict):
        return
    request = cast(Json, parsed)
    is_chat = request.get("messages") is not None
    asks_by_echo = is_chat or request.get("logprobs") is not None
    requested = {
        "prompt_logprobs": request.get("prompt_logprobs") is not None,
        "echo": bool(request.get("echo")) and asks_by_echo,
    }
    for field, is_requested in requested.items():
        if is_requested:
            raise bad_request(
                f"`{field}` is not supported here: a vLLM that holds adapters cannot report "
                "log-probabilities of a prompt.",
                field,
            )


def _policy_version(state: ServerState, body: Json | None) -> int | None:
    """Return the version of the weights that a call requests by its model name. For example, the
    name `policy-15` requests version 15. A policy is a version that the engine holds beside the
    served weights. Return None if the call requests the served weights, or an unknown model."""
    name, served = (body or {}).get("model"), state.attached_engine().info.model
    if not isinstance(name, str) or not is_policy_name(name) or name == served:
        return None
    return version_of_policy(name)


def _check_policy(state: ServerState, version: int, *, is_captured: bool) -> None:
    """Raise WireError (404) if the policy `version` must not answer a call. A policy is a version
    that the engine holds beside the served weights. The call is refused in two cases:

    * The call is captured for training. Its answer would be trained as if the served weights had
      sampled it.
    * The version was rejected. The engine may still hold its policy.
    """
    if is_captured or version in state.run.releases.state.rejected:
        raise unknown_model(policy_name(version), state.attached_engine().info.model or "")


def _is_of_proxy(headers: dict[bytes, bytes]) -> bool:
    return PROXY_HEADERS["Via"] in headers.get(b"via", b"").decode("latin-1")


def _check_previous_response(state: ServerState, key: str, checked: CheckedBody) -> None:
    """Raise WireError (404) if the engine must not get the `previous_response_id` of a request.

    The engine may get the id if two conditions hold. The engine itself stores the response, and the
    response was made with the same API key. The server checks this, because the engine does not
    check keys.
    """
    response_id = previous_response_id_of(checked.raw, checked.body)
    if response_id is None:
        return
    responses = state.responses
    if not responses.has(key, response_id) or responses.body(key, response_id) is not None:
        raise unknown_response(response_id)


def _log_direct_call(state: ServerState, headers: dict[bytes, bytes]) -> None:
    if not state.has_logged_direct_call and not _is_of_proxy(headers):
        state.has_logged_direct_call = True
        log.info(_DIRECT_CALL)


async def _attempt_twice(state: ServerState, attempt: Attempt, affinity: CallAffinity) -> None:
    """Send a call to the engine. If the call fails before anything was sent to the client, wait
    until an engine answers again. Then send the call a second time. If there are several replicas,
    the second attempt goes to another replica, without a wait.

    Raises EngineFailed if the second attempt fails too. Raises WireError if no engine answers in
    time.
    """
    async with _pass_gate(state, affinity) as (client, stamp):
        try:
            return await attempt(client, stamp)
        except EngineFailed:
            failed = client
    async with _pass_gate(state, affinity, failed) as (client, stamp):
        await attempt(client, stamp)


@asynccontextmanager
async def _pass_gate(
    state: ServerState, affinity: CallAffinity, failed: EngineClient | None = None
) -> AsyncGenerator[tuple[EngineClient, CallStamp]]:
    """Wait until an engine answers calls and no change of its weights is in progress. Yield the
    engine's EngineClient, and a stamp that records the weight versions of this call.

    The call counts as running while the `with` block runs. `failed` is the EngineClient with which
    an earlier attempt of this call failed, or None. Raises WireError (503) after HOLD_S seconds, or
    at once if the engine is stopped.
    """
    async with AsyncExitStack() as gate:
        try:
            async with asyncio.timeout(HOLD_S):
                engine = await _enter_gate(state, gate, affinity, failed)
        except TimeoutError:
            raise _never_ready() from None
        yield engine


def _never_ready() -> WireError:
    message = f"The engine did not become ready within {HOLD_S:.0f} s; see the server log."
    return unavailable(message, OutageReason.ENGINE_FAILED)


async def _enter_gate(
    state: ServerState,
    gate: AsyncExitStack,
    affinity: CallAffinity,
    failed: EngineClient | None,
) -> tuple[EngineClient, CallStamp]:
    while True:
        client = await state.wait_until_serving(failed, affinity)
        try:
            return client, await gate.enter_async_context(client.endpoint.gate.call())
        except GateAbandoned:
            continue


async def _cancel_on_disconnect(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`. If the client disconnects first, cancel `work`. The request to the engine is
    then cancelled too."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


def _siblings_of_call(headers: dict[bytes, bytes]) -> SiblingRange | None:
    value = headers.get(_SIBLING)
    if value is None:
        return None
    try:
        return parse_siblings(value.decode("latin-1"))
    except ValueError as error:
        raise bad_request(str(error)) from None


def _episode_of_call(
    state: ServerState, scope: Scope, headers: dict[bytes, bytes]
) -> Episode | None:
    """Return the claimed episode to which a call belongs, or None if the call names no episode.

    A call can name an episode in two ways: by the episode's key, or by its path. In the second
    case, the call must send the API key that claimed the episode, or the episode's key. Raises
    WireError (404) if the named episode is not claimed, or was claimed with another key. The error
    messages have AgentJet's words, because clients search for them.
    """
    key = api_key_of(headers)
    uuid = scope.get("path_params", {}).get("episode_uuid")
    has_episode_key = key is not None and key.startswith(EPISODE_KEY_PREFIX)
    by_key = state.episodes.find_by_key(key)
    if uuid is None:
        if has_episode_key and by_key is None:
            raise unclaimed_key()
        return by_key
    by_path = state.episodes.find(uuid)
    if by_path is None:
        raise not_found(f"Episode {uuid} not found.")
    if has_episode_key and by_key is not by_path:
        raise not_found(f"The episode {uuid} is not claimed, cannot accept new requests.")
    if by_key is not by_path:
        try:
            state.episodes.check_owner(uuid, caller_of(state, scope))
        except EpisodeRefused as refused:
            raise not_found(refused.detail) from None
    return by_path


def _with_model(checked: CheckedBody, model: str | None) -> CheckedBody:
    """Return the request body with its field `model` set to the parameter `model`, the served
    model's name. An agent may send any name. If `model` is None, return the body unchanged."""
    if checked.body is None or model is None or checked.body.get("model") == model:
        return checked
    raw, body = rewrite_body(checked.raw, model=model), checked.body | {"model": model}
    return replace(checked, raw=raw, body=body)
