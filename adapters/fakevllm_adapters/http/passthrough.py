"""vLLM's routes that are relayed unchanged.

vLLM's other routes (development, scale-out, administration) are not relayed: they are not for apps.
"""

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
"""Path patterns and their methods. `/v1/models`, `/health` and `/metrics` have routes of their
own."""

_PLAIN = re.compile(r"(/[\w-]+)+", re.ASCII)


def path_with_query(path: str, query: bytes) -> str:
    """Return the path and the query of a request, for the same request to the upstream.

    Raises WireError (404) if the decoded path could lead to another route, such as a path with
    `..`.
    """
    if _PLAIN.fullmatch(path) is None:
        raise WireError(404, {"detail": "Not Found"})
    return f"{path}?{query.decode('latin-1')}" if query else path
