"""vLLM's OpenAPI document: which of its operations apps reach through us, and the same document
drawn tighter, so that what is generated from it is mostly answered and not refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.passthrough import PASSTHROUGH

Json = dict[str, Any]
Operation = tuple[str, str]
"""Method in capitals, and the path's pattern."""

SERVED: frozenset[Operation] = frozenset(
    {
        *(("POST", adapter.path) for adapter in ADAPTERS.values()),
        *((method, path) for path, methods in PASSTHROUGH.items() for method in methods),
        *(("GET", path) for path in ("/v1/models", "/health", "/metrics")),
    }
)
TIGHT = Path(__file__).parent / "tight.json"


def operations(document: Json) -> set[Operation]:
    paths: dict[str, Json] = document["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def tightened(document: Json) -> Json:
    """Fields by name: those that make a request fail here are left out, and numbers and texts are
    small and allowed. Nothing but named fields is drawn."""
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
        name: tight["drawn from"].get(name, drawn)
        for name, drawn in schema["properties"].items()
        if name not in tight["left out"] or name in schema["required"]
    }
