"""A request's body as JSON, refused in vLLM's words where it is none."""

from __future__ import annotations

import json
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.http.limits import is_deeper
from fakevllm_adapters.protocol.errors import bad_json, schema_error

MAX_DEPTH = 250
"""What orjson can write again, with room for what is wrapped around it."""


def loads(raw: bytes) -> Any:
    """What orjson refuses (NaN, half surrogates, numbers without end) is refused everywhere alike.
    Raises WireError."""
    if is_deeper(raw, MAX_DEPTH):
        raise bad_json(0, f"Nested deeper than {MAX_DEPTH} levels")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    try:  # the standard library words its complaints as vLLM shows them
        json.loads(raw)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except UnicodeDecodeError:
        position, reason = 0, "Invalid UTF-8"
    except (ValueError, RecursionError):  # thousands of digits, endless nesting: ours says it
        pass
    raise bad_json(position, reason)


def object_of(raw: bytes) -> Json:
    """Raises WireError."""
    value = loads(raw)
    if isinstance(value, dict):
        return cast(Json, value)
    problem: Json = {
        "type": "model_attributes_type",
        "loc": (),
        "msg": "Input should be a valid dictionary or object to extract fields from",
        "input": value,
    }
    raise schema_error([problem])
