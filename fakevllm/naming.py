"""The same request of another model."""

from __future__ import annotations

from dataclasses import replace

import orjson

from fakevllm.siblings import Request
from fakevllm_adapters.http.limits import rewritten


def with_model(request: Request, model: str) -> Request:
    """What is no object of JSON names no model, and stays as it is."""
    try:
        raw = rewritten(request.raw, model=model)
    except (ValueError, AttributeError, RecursionError):
        return request
    if request.exchange is None:
        return replace(request, raw=raw, asked=raw)
    request.exchange.body["model"] = model
    asked = orjson.dumps(request.exchange.body) if request.is_translated else raw
    return replace(request, raw=raw, asked=asked)
