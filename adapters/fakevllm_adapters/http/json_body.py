"""Parse request bodies as JSON, with vLLM's error texts for malformed bodies.

This module does no I/O.
"""

from __future__ import annotations

import json
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.http.json_depth import is_deeper
from fakevllm_adapters.protocol.errors import bad_json, schema_error

MAX_DEPTH = 250
"""Maximum nesting of a body. At this depth, orjson can still write the body inside a few enclosing
objects."""


def parse_json(raw: bytes) -> Any:
    """Parse a JSON body. Raises WireError (400) if orjson does not accept the body as JSON.

    Unlike Python's json, orjson refuses NaN, lone surrogates, and numbers that are too long. Bodies
    that are nested deeper than MAX_DEPTH are refused too.
    """
    if is_deeper(raw, MAX_DEPTH):
        raise bad_json(0, f"Nested deeper than {MAX_DEPTH} levels")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    try:  # vLLM shows the messages of the standard library
        json.loads(raw)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except UnicodeDecodeError:
        position, reason = 0, "Invalid UTF-8"
    except (ValueError, RecursionError):  # thousands of digits, endless nesting
        pass  # orjson's message stays
    raise bad_json(position, reason)


def parse_as_vllm(raw: bytes) -> object:
    """Return the JSON value of a body, parsed with Python's json module as in vLLM. Python's json
    accepts some bodies that orjson refuses. Return None for a body that is not JSON.

    The caller must have refused bodies that are nested deeper than MAX_DEPTH. This process may be
    unable to parse deeper bodies that vLLM can parse. vLLM would then read content that was never
    checked.
    """
    try:
        return json.loads(raw)
    except ValueError:
        return None


def parse_object(raw: bytes) -> Json:
    """Return the object in a JSON body. Raises WireError (400) if the body is not a JSON object."""
    value = parse_json(raw)
    if isinstance(value, dict):
        return cast(Json, value)
    problem: Json = {
        "type": "model_attributes_type",
        "loc": (),
        "msg": "Input should be a valid dictionary or object to extract fields from",
        "input": value,
    }
    raise schema_error([problem])
