"""Calls to the model: by sibling header, by episode path or key, or by nobody in particular
(served, not captured)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from fakevllm_adapters.formats.base import Adapter
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
    send_error,
    wait_for_disconnect,
)
from fakevllm_adapters.http.client_body import CheckedBody, check_body, rewrite_body
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.http.passthrough import path_with_query
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, bad_request, unavailable
from fakevllm_adapters.protocol.keys import EPISODE_KEY_PREFIX
from fakevllm_adapters.protocol.reasons import OutageReason
from fakevllm_adapters.protocol.swarm import (
    PROXY_HEADERS,
    SIBLING_HEADER,
    SiblingRef,
    parse_sibling,
)
from fakevllm_server.episodes.registry import Episode, EpisodeRefused
from fakevllm_server.rollout.engine_client import EngineClient, EngineFailed
from fakevllm_server.types.weight_gate import CallStamp, GateAbandoned
from fakevllm_server.web.routes.access import caller_of, not_found, unclaimed_key
from fakevllm_server.web.routes.client_call import Attempt, ClientCall
from fakevllm_server.web.state import ServerState

log = logging.getLogger("fakevllm.server")

LIMITS = Limits()
HOLD_S = 300.0
"""How long a call waits for an engine that is being started again, or given new weights."""
_SIBLING = SIBLING_HEADER.lower().encode()
_STRAYS = (
    "A call came past the proxy, and it is no episode's: such calls are answered and not trained. "
    "For an app to train, its OPENAI_BASE_URL names the proxy (`fakevllm serve`). Said once."
)
_GONE = "The engine did not answer; it is being started again."


def door(state: ServerState, adapter: Adapter | None) -> AsgiApp:
    """The ASGI endpoint of one wire format; None: of the routes that are passed on as they are."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            state.attached_engine()
            body = await read_body(receive)
            work = (
                _relayed(state, scope, body, send)
                if adapter is None
                else _answer(state, scope, adapter, body, send)
            )
            await _unless_left(receive, work)
        except WireError as error:
            await send_error(send, error, with_reason=True)
        except ClientDisconnected:
            pass
        except (EngineFailed, TimeoutError):
            gone = unavailable(_GONE, OutageReason.ENGINE_FAILED)
            await send_error(send, gone, with_reason=True)

    return app


async def _relayed(state: ServerState, scope: Scope, body: bytes, send: Send) -> None:
    """A small route of the engine's."""
    headers = header_map(scope)
    _episode(state, scope, headers)  # refuses those that are gone
    path: str = scope["path"].removeprefix(f"/e/{scope['path_params'].get('episode_uuid')}")
    path = path_with_query(path, scope.get("query_string", b""))
    await state.serving_engine().relay(scope["method"], path, body, engine_headers(headers), send)


async def _answer(
    state: ServerState, scope: Scope, adapter: Adapter, body: bytes, send: Send
) -> None:
    headers = header_map(scope)
    sibling = _sibling(headers)
    episode = _episode(state, scope, headers)
    if sibling is not None and episode is not None:
        raise bad_request(f"{SIBLING_HEADER} is not for the key of an episode.")
    # What comes from a proxy has been checked there, by limits that its user may have set.
    job = None
    if episode is None:
        found = CheckedBody(body, json_object(body))
    else:
        job, served = state.job, state.attached_engine().info.model
        found = _of_its_model(check_body(body, LIMITS), served)
    call = ClientCall(adapter, found.raw, found.body, engine_headers(headers), send, job)
    if sibling is None and episode is None:
        if not state.has_logged_stray_calls and PROXY_HEADERS["Via"] not in _via(headers):
            state.has_logged_stray_calls = True
            log.info(_STRAYS)
        return await _twice(state, call.relay)
    if sibling is not None:
        return await _twice(state, call.captured(partial(state.intake.add_call, sibling)))
    assert episode is not None
    now = time.monotonic()
    state.episodes.call_begins(episode, now)
    state.participation.clients.touch(episode.client_uuid, now)
    try:
        # Kept before the last byte goes out: the client may end the episode at it.
        await _twice(state, call.captured(partial(state.intake.add_episode_call, episode)))
    finally:
        state.episodes.call_ends(episode, time.monotonic())


async def _twice(state: ServerState, attempt: Attempt) -> None:
    """Through to the engine; and once more, after it is back, where it fails before anything was
    sent. Raises EngineFailed the second time; WireError where it stays away."""
    async with _entered(state) as (upstream, stamp):
        try:
            return await attempt(upstream, stamp)
        except EngineFailed:
            failed = upstream
    async with _entered(state, failed) as (upstream, stamp):
        await attempt(upstream, stamp)


@asynccontextmanager
async def _entered(
    state: ServerState, failed: EngineClient | None = None
) -> AsyncGenerator[tuple[EngineClient, CallStamp]]:
    """An engine that answers, with the call counted at its gate."""
    async with AsyncExitStack() as gate:
        try:
            async with asyncio.timeout(HOLD_S):
                entered = await _through(state, gate, failed)
        except TimeoutError:
            message = f"The engine did not become ready within {HOLD_S:.0f} s; see the server log."
            raise unavailable(message, OutageReason.ENGINE_FAILED) from None
        yield entered


async def _through(
    state: ServerState, gate: AsyncExitStack, failed: EngineClient | None
) -> tuple[EngineClient, CallStamp]:
    while True:
        upstream = await state.wait_until_serving(failed)
        try:
            return upstream, await gate.enter_async_context(upstream.endpoint.gate.call())
        except GateAbandoned:
            continue


async def _unless_left(receive: Receive, work: Awaitable[None]) -> None:
    """Cancels the call, and with it the engine's work, when the client leaves."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


def _via(headers: dict[bytes, bytes]) -> str:
    return headers.get(b"via", b"").decode("latin-1")


def _sibling(headers: dict[bytes, bytes]) -> SiblingRef | None:
    value = headers.get(_SIBLING)
    if value is None:
        return None
    try:
        return parse_sibling(value.decode("latin-1"))
    except ValueError as error:
        raise bad_request(str(error)) from None


def _episode(state: ServerState, scope: Scope, headers: dict[bytes, bytes]) -> Episode | None:
    """The claimed episode a call belongs to: its key names it, or the path does to whose key
    claimed it. A key or path that names none is refused, as the protocol words it."""
    key = api_key_of(headers)
    uuid = scope.get("path_params", {}).get("episode_uuid")
    is_of_one = key is not None and key.startswith(EPISODE_KEY_PREFIX)
    by_key = state.episodes.find_by_key(key)
    if uuid is None:
        if is_of_one and by_key is None:
            raise unclaimed_key()
        return by_key
    named = state.episodes.find(uuid)
    if named is None:
        raise not_found(f"Episode {uuid} not found.")
    if is_of_one and by_key is not named:
        raise not_found(f"The episode {uuid} is not claimed, cannot accept new requests.")
    if by_key is not named:
        try:
            state.episodes.check_owner(uuid, caller_of(state, scope))
        except EpisodeRefused as refused:
            raise not_found(refused.detail) from None
    return named


def _of_its_model(found: CheckedBody, model: str | None) -> CheckedBody:
    """An episode is one model's, whatever its agent calls it."""
    if found.body is None or model is None or found.body.get("model") == model:
        return found
    raw, body = rewrite_body(found.raw, model=model), found.body | {"model": model}
    return replace(found, raw=raw, body=body)
