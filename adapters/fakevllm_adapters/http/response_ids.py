"""Find the ids of responses (OpenAI's Responses format) in requests, and in the bytes that are sent
to a client."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.json_strings import find_string
from fakevllm_adapters.http.asgi import Send
from fakevllm_adapters.http.json_body import parse_as_vllm

MAX_SCANNED_BYTES = 64 * 1024
"""Number of bytes at the start of an answer in which the id is searched. vLLM writes the id
first."""
_ID_PATHS = frozenset({(b"id",), (b"response", b"id")})
"""Keys that lead to the id: in a whole answer, and in an event of a stream."""


def previous_response_id_of(raw: bytes, body: Json | None) -> str | None:
    """Return the `previous_response_id` of a request. Return None if the request has no such field.

    `body` is the parsed request. If `body` is None, `raw` is parsed as in vLLM, which accepts some
    bodies that orjson refuses.

    >>> previous_response_id_of(b'{"previous_response_id": "resp_1", "top_p": NaN}', None)
    'resp_1'
    """
    request = _request_object(raw, body)
    response_id: object = request.get("previous_response_id") if request is not None else None
    return response_id if isinstance(response_id, str) else None


def chooses_response_id(raw: bytes, body: Json | None) -> bool:
    """Return True if the engine's own Responses route may take the id of the response from the
    request.

    vLLM takes the id from the field `request_id`. In this field, a client could send the id of
    another client's response. Therefore the client must not count as the owner of a response whose
    id it has chosen.

    >>> chooses_response_id(b'{"request_id": "resp_1"}', None), chooses_response_id(b"{}", None)
    (True, False)
    """
    request = _request_object(raw, body)
    return request is None or "request_id" in request


def _request_object(raw: bytes, body: Json | None) -> Json | None:
    request = body if body is not None else parse_as_vllm(raw)
    return cast(Json, request) if isinstance(request, dict) else None


def watch_response_id(send: Send, on_response_id: Callable[[str], None]) -> Send:
    """Return an ASGI `send` that finds the id of a response in the bytes sent to the client. The
    returned function calls `on_response_id` with the id before the client gets the id.

    The callback is called at most once, and only if the status is 200.
    """
    status, seen, is_done = 0, b"", False

    async def watched(message: MutableMapping[str, Any]) -> None:
        nonlocal status, seen, is_done
        if message["type"] == "http.response.start":
            status = message["status"]
        elif not is_done and status == 200:
            chunk: bytes = message.get("body", b"")
            seen += chunk[: MAX_SCANNED_BYTES - len(seen)]
            span = find_string(seen, _ID_PATHS)
            is_done = span is not None or len(seen) >= MAX_SCANNED_BYTES
            if span is not None:
                on_response_id(seen[slice(*span)].decode(errors="replace"))
            seen = b"" if is_done else seen
        await send(message)

    return watched
