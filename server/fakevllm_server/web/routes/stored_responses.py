"""GET, DELETE and cancel of a stored response, for the key that made the response."""

from __future__ import annotations

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.responses.refusals import not_cancellable, unknown_response
from fakevllm_adapters.formats.responses.stored import check_query, deletion, refuse_stream
from fakevllm_adapters.http.asgi import (
    AsgiApp,
    Headers,
    Scope,
    Send,
    engine_headers,
    header_map,
    send_bytes,
    send_json,
)
from fakevllm_adapters.http.passthrough import path_with_query
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_server.rollout.engine_client import EngineClient, Refused
from fakevllm_server.web.routes.inference import (
    attempt_when_serving,
    engine_endpoint,
    key_fingerprint,
    path_at_engine,
    relay_route,
)
from fakevllm_server.web.server_state import ServerState

PATH = "/v1/responses/{response_id}"
CANCEL_PATH = f"{PATH}/cancel"
_JSON: Headers = [(b"content-type", b"application/json")]


def create_endpoint(state: ServerState) -> AsgiApp:
    """Return the ASGI endpoint of PATH (GET and DELETE) and CANCEL_PATH (POST)."""

    async def answer(scope: Scope, body: bytes, send: Send) -> None:
        path = path_with_query(path_at_engine(state, scope), scope["query_string"])
        headers = header_map(scope)
        if scope["method"] == "GET":
            try:
                check_query(scope["query_string"])
            except WireError as error:
                return await _send_query_error(state, path, headers, send, error)
        response_id: str = scope["path_params"]["response_id"]
        key, responses = key_fingerprint(headers), state.responses
        if not responses.has(key, response_id):
            raise unknown_response(response_id)
        if scope["method"] == "DELETE":
            responses.delete(key, response_id)
            return await send_json(send, 200, deletion(response_id))
        stored = responses.body(key, response_id)
        if stored is None:
            return await relay_route(state, scope, body, send)
        if scope["method"] == "POST":
            raise not_cancellable()
        refuse_stream(scope["query_string"], response_id)
        await send_bytes(send, 200, stored, _JSON)

    return engine_endpoint(state, answer)


async def _send_query_error(
    state: ServerState, path: str, headers: dict[bytes, bytes], send: Send, error: WireError
) -> None:
    """Send the engine's refusal of a query. Raises `error` if the engine has no such route.

    The engine refuses such a query before it looks for the response.
    """

    async def attempt(engine: EngineClient) -> None:
        await engine.relay("GET", path, b"", engine_headers(headers), send, _is_not_found)

    try:
        await attempt_when_serving(state, attempt)
    except Refused:
        raise error from None


def _is_not_found(status: int, body: Json) -> bool:
    return status == 404
