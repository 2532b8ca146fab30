"""The routes GET, DELETE and cancel for a stored response. A client may use these routes only with
the API key that made the response."""

from __future__ import annotations

from fakevllm_adapters.formats.responses.refusals import not_cancellable, unknown_response
from fakevllm_adapters.formats.responses.stored import check_query, deletion, refuse_stream
from fakevllm_adapters.http.asgi import (
    AsgiApp,
    Headers,
    Scope,
    Send,
    header_map,
    send_bytes,
    send_json,
)
from fakevllm_server.web.routes.inference import (
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
    """Return the ASGI endpoint for the paths PATH (GET and DELETE) and CANCEL_PATH (POST) of a
    stored response."""

    async def answer(scope: Scope, body: bytes, send: Send) -> None:
        path_at_engine(state, scope)
        method, query = scope["method"], scope["query_string"]
        response_id: str = scope["path_params"]["response_id"]
        key, responses = key_fingerprint(header_map(scope)), state.responses
        is_found = responses.has(key, response_id)
        stored = responses.body(key, response_id) if is_found else None
        if is_found and stored is None and method != "DELETE":
            return await relay_route(state, scope, body, send)
        if method == "GET":
            check_query(query)  # vLLM checks the query before it looks for the response
        if not is_found:
            raise unknown_response(response_id)
        if method == "DELETE":
            responses.delete(key, response_id)
            return await send_json(send, 200, deletion(response_id))
        if method == "POST":
            raise not_cancellable()
        assert stored is not None, "a response that only the engine has was relayed"
        refuse_stream(query, response_id)
        await send_bytes(send, 200, stored, _JSON)

    return engine_endpoint(state, answer)
