"""Routes of a vLLM that are relayed as they are. Everything else it has (its development,
scale-out and administration routes) is not for apps."""

from __future__ import annotations

import re

from fakevllm_adapters.protocol.errors import WireError

PASSTHROUGH: dict[str, tuple[str, ...]] = {
    "/version": ("GET",),
    "/ping": ("GET", "POST"),
    "/load": ("GET",),
    "/tokenize": ("POST",),
    "/detokenize": ("POST",),
    "/v1/messages/count_tokens": ("POST",),
    "/v1/responses/{response_id}": ("GET",),
    "/v1/responses/{response_id}/cancel": ("POST",),
}
"""Path patterns and their methods. `/v1/models`, `/health` and `/metrics` are answered by routes of
their own."""

_PLAIN = re.compile(r"(/[\w-]+)+", re.ASCII)


def whole_path(path: str, query: bytes) -> str:
    """A routed path with its query, as it goes upstream. Raises WireError (404) where a decoded
    path would lead elsewhere, as one with `..` in it."""
    if _PLAIN.fullmatch(path) is None:
        raise WireError(404, {"detail": "Not Found"})
    return f"{path}?{query.decode('latin-1')}" if query else path
