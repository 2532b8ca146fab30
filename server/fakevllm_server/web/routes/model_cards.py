"""The route GET /v1/models/ID, which returns one model's card. The card is taken from the engine's
list of models."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from fakevllm_adapters.http.asgi import (
    AsgiApp,
    Headers,
    Scope,
    Send,
    engine_headers,
    header_map,
    send_bytes,
)
from fakevllm_adapters.http.model_cards import MODELS_PATH, card_in, model_id_of
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.web.routes.inference import (
    attempt_when_serving,
    engine_endpoint,
    path_at_engine,
)
from fakevllm_server.web.server_state import ServerState

_JSON: Headers = [(b"content-type", b"application/json")]


def create_endpoint(state: ServerState) -> AsgiApp:
    """Return the ASGI endpoint of one model's card."""

    async def answer(scope: Scope, body: bytes, send: Send) -> None:
        path, headers = path_at_engine(state, scope), engine_headers(header_map(scope))
        messages: list[MutableMapping[str, Any]] = []

        async def collect(message: MutableMapping[str, Any]) -> None:
            messages.append(message)

        async def attempt(engine: EngineClient) -> None:
            messages.clear()
            await engine.relay("GET", MODELS_PATH, b"", headers, collect)

        await attempt_when_serving(state, attempt)
        if messages[0]["status"] != 200:
            for message in messages:
                await send(message)
            return
        listing = b"".join(message.get("body", b"") for message in messages[1:])
        await send_bytes(send, 200, card_in(listing, model_id_of(path)), _JSON)

    return engine_endpoint(state, answer)
