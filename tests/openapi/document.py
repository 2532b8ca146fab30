"""vLLM's OpenAPI document: the operations that apps reach through the proxy, and a restricted
version of the document, from which mostly acceptable requests are generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.passthrough import PASSTHROUGH

Json = dict[str, Any]
Operation = tuple[str, str]
"""Method in capital letters, and the path's pattern."""

SERVED: frozenset[Operation] = frozenset(
    {
        *(("POST", adapter.path) for adapter in ADAPTERS.values()),
        *((method, path) for path, methods in PASSTHROUGH.items() for method in methods),
        *(("GET", path) for path in ("/v1/models", "/health", "/metrics")),
    }
)
TIGHT = Path(__file__).parent / "tight.json"
"""Restrictions of the document."""


def operations(document: Json) -> set[Operation]:
    """Return all operations of the document."""
    paths: dict[str, Json] = document["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def restrict(document: Json) -> Json:
    """Return the document with the restrictions of tight.json.

    Fields with which every request fails in this setup are left out. Numbers and texts are small
    and allowed. Only fields that the document names are generated.
    """
    tight: Json = json.loads(TIGHT.read_text())
    changed: Json = json.loads(json.dumps(document))
    schemas: dict[str, Json] = changed["components"]["schemas"]
    for name, schema in schemas.items():
        if "properties" in schema:
            schema.setdefault("required", []).extend(tight["required"].get(name, []))
            schema["properties"] = _fields(schema, tight)
            schema["additionalProperties"] = False
    schemas.update(tight["schemas"])
    for methods in changed["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                parameter["schema"] |= tight["path parameters"].get(parameter["name"], {})
    return changed


def _fields(schema: Json, tight: Json) -> Json:
    return {
        name: tight["drawn from"].get(name, field)
        for name, field in schema["properties"].items()
        if name not in tight["left out"] or name in schema["required"]
    }
