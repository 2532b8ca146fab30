"""Calls to the model: by sibling header, by episode path or key, or by nobody in particular
(served, not captured)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

import aiohttp

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
    until_disconnect,
)
from fakevllm_adapters.errors import WireError, bad_request, error_body, unavailable
from fakevllm_adapters.keys import EPISODE_KEY_PREFIX
from fakevllm_adapters.swarm import SIBLING_HEADER, SiblingRef, parse_sibling
from fakevllm_server.calls import RecordedCall
from fakevllm_server.capture import Capture
from fakevllm_server.episodes import Episode
from fakevllm_server.forward import EngineClient
from fakevllm_server.swarm import Swarm

CHAT = "/v1/chat/completions"
_SIBLING = SIBLING_HEADER.lower().encode()


def door(swarm: Swarm, path: str) -> AsgiApp:
    """The ASGI endpoint of one inference path."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            upstream = _upstream(swarm)
            body = await read_body(receive)
            work = _answer(swarm, upstream, scope, path, body, send)
            await _unless_left(receive, work)
        except WireError as error:
            await send_error(send, error)
        except ClientLeft:
            pass
        except (aiohttp.ClientError, TimeoutError):
            await send_error(
                send, unavailable("The engine did not answer; it is being started again.")
            )

    return app


async def _answer(
    swarm: Swarm,
    upstream: EngineClient,
    scope: Scope,
    path: str,
    body: bytes,
    send: Send,
) -> None:
    headers = header_map(scope)
    own = engine_headers(headers)
    sibling = _sibling(headers)
    episode = _episode(swarm, scope, headers)
    if sibling is not None and episode is not None:
        raise bad_request(f"{SIBLING_HEADER} is not for the key of an episode.")
    parsed = json_object(body) if scope["method"] == "POST" else None
    if (sibling is None and episode is None) or parsed is None or path != CHAT:
        return await upstream.relay(scope["method"], path, body, own, send)
    capture = Capture(parsed, upstream.endpoint.default_sampling)
    if sibling is not None:

        def pool() -> None:
            call = capture.record(swarm.engine.version)
            if call is not None:
                swarm.pool.add_call(sibling, call, time.monotonic())

        return await upstream.capture(path, capture, own, send, pool)
    assert episode is not None
    swarm.episodes.call_begins(episode, time.monotonic())
    record: list[RecordedCall | None] = []
    try:
        await upstream.capture(
            path, capture, own, send, lambda: record.append(capture.record(swarm.engine.version))
        )
    finally:
        swarm.episodes.call_ends(episode, record[0] if record else None, time.monotonic())


async def _unless_left(receive: Receive, work: Awaitable[None]) -> None:
    """Cancels the call, and with it the engine's work, when the client leaves."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


def _upstream(swarm: Swarm) -> EngineClient:
    if swarm.upstream is None or not swarm.engine.is_serving:
        detail = f" ({swarm.engine.detail})" if swarm.engine.detail else ""
        raise unavailable(f"The engine is not ready: {swarm.engine.status}{detail}.")
    return swarm.upstream


def _sibling(headers: dict[bytes, bytes]) -> SiblingRef | None:
    value = headers.get(_SIBLING)
    if value is None:
        return None
    try:
        return parse_sibling(value.decode("latin-1"))
    except ValueError as error:
        raise bad_request(str(error)) from None


def _episode(swarm: Swarm, scope: Scope, headers: dict[bytes, bytes]) -> Episode | None:
    """The claimed episode a call belongs to. A key or path that names none is refused, as the
    protocol words it."""
    key = key_of(headers)
    uuid = scope.get("path_params", {}).get("episode_uuid")
    owner = swarm.episodes.of_key(key)
    if uuid is None and owner is None:
        if key is not None and key.startswith(EPISODE_KEY_PREFIX):
            raise _not_found("The episode of this key is not claimed, cannot accept new requests.")
        return None
    if uuid is not None and swarm.episodes.find(uuid) is None:
        raise _not_found(f"Episode {uuid} not found.")
    if owner is None or (uuid is not None and owner.uuid != uuid):
        raise _not_found(f"The episode {uuid} is not claimed, cannot accept new requests.")
    return owner


def _not_found(message: str) -> WireError:
    return WireError(404, error_body(message, "NotFoundError", 404))
