"""vLLM's routes that are relayed unchanged.

All other routes of vLLM (development, scale-out, administration) are not for apps.
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
    """Return a routed path with its query for the request to the upstream.

    Raises WireError (404) if the decoded path could lead elsewhere, such as one with `..`.
    """
    if _PLAIN.fullmatch(path) is None:
        raise WireError(404, {"detail": "Not Found"})
    return f"{path}?{query.decode('latin-1')}" if query else path
