"""Check the request bodies of clients against the limits, and remove forbidden fields.

This module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.http.asgi import json_object
from fakevllm_adapters.http.limits import Limits

FORBIDDEN_FIELDS = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
        *("api_base", "api_key", "api_type", "api_version", "base_url"),
        *("custom_llm_provider", "extra_headers"),
    }
)
"""Body fields that clients may not set. Some control an engine's internals. Others could tell a
gateway between proxy and engine to send the request elsewhere."""


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A client's request body that is within the limits and has no forbidden fields."""

    raw: bytes
    """The client's own bytes, or a rewritten body if a field was removed."""
    body: Json | None
    """The parsed body, or None if `orjson` cannot read the body as an object. In that case, the
    engine decides whether to accept the body, and writes the error if it does not."""
    removed: tuple[str, ...] = ()
    """Names of the removed fields."""


def check_body(
    raw: bytes, limits: Limits, num_siblings: int = 1, allowed: Collection[str] = ()
) -> CheckedBody:
    """Check a client's request body against the limits, and remove the forbidden fields.

    Forbidden fields that are named in `allowed` are kept. `num_siblings` is the number of requests
    that will be made from the body. Raises WireError (400) if the body exceeds a limit.
    """
    refusal = limits.depth_refusal(raw)
    if refusal is not None:
        raise refusal
    body = json_object(raw)
    if body is None:
        return _check_unparsed(raw, allowed)
    refusal = limits.body_refusal(body, num_siblings)
    if refusal is not None:
        raise refusal
    body, removed = without_forbidden_fields(body, allowed)
    return CheckedBody(rewrite_body(raw, without=removed) if removed else raw, body, removed)


def rewrite_body(raw: bytes, *, without: Collection[str] = (), **changed: Any) -> bytes:
    """Return a request body without the fields in `without`, and with the fields in `changed`.

    `raw` is the JSON text of an object that orjson can read. The function uses Python's json
    anyway, because orjson would turn integers beyond 64 bits into floats. An error message of the
    engine would then quote a number that the client did not send.
    """
    kept = {name: value for name, value in json.loads(raw).items() if name not in without}
    return json.dumps(kept | changed, ensure_ascii=False, separators=(",", ":")).encode()


def without_forbidden_fields(
    body: Json, allowed: Collection[str] = ()
) -> tuple[Json, tuple[str, ...]]:
    """Return (body without forbidden fields, names of the removed fields).

    Forbidden fields that are named in `allowed` are kept. If no field is removed, the returned body
    is the same object as the argument.
    """
    removed = tuple(name for name in body if name in FORBIDDEN_FIELDS and name not in allowed)
    if not removed:
        return body, ()
    return {name: value for name, value in body.items() if name not in removed}, removed


def _check_unparsed(raw: bytes, allowed: Collection[str]) -> CheckedBody:
    """Remove the forbidden fields from a body that orjson cannot parse as an object.

    vLLM may accept such a body, because vLLM parses it with Python's json. Python's json accepts
    NaN, lone surrogates, a byte order mark and UTF-16, which orjson refuses. If the body has no
    forbidden fields, return it unchanged.
    """
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return CheckedBody(raw, None)
    if not isinstance(value, dict):
        return CheckedBody(raw, None)
    body, removed = without_forbidden_fields(cast(Json, value), allowed)
    return CheckedBody(json.dumps(body).encode() if removed else raw, None, removed)
