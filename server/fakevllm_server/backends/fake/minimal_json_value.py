"""The minimal value that a JSON schema allows. The fake engine answers with this value if a JSON
schema constrains the answer.

A minimal object has only the required properties. A minimal number is the allowed number closest to
0. A minimal string is the shortest allowed string. Of several alternatives, the first is used.
"""

from __future__ import annotations

import math
from typing import Any, cast

Json = dict[str, Any]

MAX_DEPTH = 50
"""Maximum depth of nested schemas and references."""
_TEXTS = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P0D",
    "email": "a@b.co",
    "hostname": "a.co",
    "ipv4": "0.0.0.0",
    "ipv6": "::",
    "uri": "http://a.co",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
"""The minimal string for each `format` of a schema."""


def minimal_value(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """Return the minimal value that `schema` allows. `root` is the whole schema, to which
    references (`$ref`) in `schema` refer. By default, `root` is `schema`. `depth` is the nesting
    depth so far.

    Raises ValueError for a schema that allows no value, and for a schema with keywords that are not
    supported.

    >>> a = {"type": "integer"}
    >>> minimal_value({"type": "object", "required": ["a"], "properties": {"a": a}})
    {'a': 0}
    """
    root = schema if root is None else root
    if schema is True or schema == {}:
        return None
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        raise ValueError("the schema allows no value, or only values of endless depth")
    node = cast(Json, schema)
    if "$ref" in node:
        return minimal_value(_resolve(str(node["$ref"]), root), root, depth + 1)
    for key in ("const", "enum", "anyOf", "oneOf", "allOf"):
        if key in node:
            return _value_of_choice(key, node, root, depth)
    return _value_of_type(node, root, depth)


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise ValueError(f"{reference} refers to another document")
    node = root
    for part in filter(None, reference[1:].split("/")):
        if not isinstance(node, dict) or part not in node:
            raise ValueError(f"{reference} refers to nothing")
        node = cast(Json, node)[part]
    return node


def _value_of_choice(key: str, node: Json, root: Any, depth: int) -> Any:
    if key == "const":
        return node[key]
    if not isinstance(node[key], list) or not node[key]:
        raise ValueError(f"{key} is not a list of choices")
    if key == "enum":
        return node[key][0]
    rest = {name: value for name, value in node.items() if name != key}
    parts: list[Any] = node[key] if key == "allOf" else node[key][:1]
    for part in parts:
        resolved = _resolve(part["$ref"], root) if "$ref" in part else part
        rest |= resolved
    return minimal_value(rest, root, depth + 1)


def _value_of_type(node: Json, root: Any, depth: int) -> Any:
    kinds: Any = node.get("type", "object" if "properties" in node else "null")
    kind: Any = cast(list[Any], kinds)[0] if isinstance(kinds, list) else kinds
    match kind:
        case "object":
            properties: Json = node.get("properties") or {}
            required: list[str] = node.get("required") or []
            return {
                name: minimal_value(properties.get(name, {}), root, depth + 1) for name in required
            }
        case "array":
            return _array_value(node, root, depth)
        case "string":
            return _text_value(node)
        case "integer" | "number":
            return _number_value(node, kind == "integer")
        case "boolean":
            return False
        case "null":
            return None
        case _:
            raise ValueError(f"unknown type {kind!r}")


def _array_value(node: Json, root: Any, depth: int) -> list[Any]:
    first: list[Any] = node.get("prefixItems") or []
    items = [*first, *[node.get("items", {})] * max(0, node.get("minItems", 0) - len(first))]
    return [
        minimal_value(item, root, depth + 1) for item in items[: max(node.get("minItems", 0), 0)]
    ]


def _text_value(node: Json) -> str:
    if "pattern" in node:
        raise ValueError("this engine does not support `pattern`")
    text = _TEXTS.get(node.get("format", ""), "")
    return text + "x" * (node.get("minLength", 0) - len(text))


def _number_value(node: Json, is_integer: bool) -> float | int:
    step = node.get("multipleOf") or 1
    least = node.get("minimum", -math.inf)
    if "exclusiveMinimum" in node:
        least = max(least, node["exclusiveMinimum"] + step)
    most = node.get("maximum", math.inf)
    if "exclusiveMaximum" in node:
        most = min(most, node["exclusiveMaximum"] - step)
    value = min(max(0, least), most)
    value = math.ceil(value / step) * step if is_integer or "multipleOf" in node else value
    if not least <= value <= most:
        raise ValueError("no number is within the bounds")
    return int(value) if is_integer else value
