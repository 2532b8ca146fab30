"""Routes of a vLLM that are relayed as they are. Everything else it has (its development,
scale-out and administration routes) is not for apps."""

from __future__ import annotations

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
