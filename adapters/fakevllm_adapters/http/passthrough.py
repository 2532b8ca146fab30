"""The routes of vLLM whose requests are relayed unchanged.

vLLM's routes for development, scaling and administration are not relayed. These routes are not
meant for apps.
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
}
"""Methods of each path whose requests are relayed unchanged. `/v1/models`, `/v1/responses/ID`,
`/health` and `/metrics` have routes of their own."""

NEVER_WAIT = frozenset({"/health", "/ping", "/load", "/metrics"})
"""Paths that are answered at once while the engine boots, because a monitor asks whether the engine
is ready now. Requests for other paths wait for the engine."""

_PLAIN = re.compile(r"(/[\w-]+)+", re.ASCII)


def path_with_query(path: str, query: bytes) -> str:
    """Return the path of a request with its query, for relaying the request to the engine.

    Raises WireError (404) if the decoded path could lead to another route. An example is a path
    with `..`.
    """
    if _PLAIN.fullmatch(path) is None:
        raise WireError(404, {"detail": "Not Found"})
    return f"{path}?{query.decode('latin-1')}" if query else path
