"""Send calls for the served weights to the engine's newest LoRA adapter, and show the model's name
in the answers.

An engine with LoRA adapters knows the served weights by the name of an adapter, which changes with
each version. Apps know the served weights by the name of the model.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import orjson

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AdapterName:
    """The two names of the served weights. Apps send the name `model`. The engine knows these
    weights by `adapter`, the name of a LoRA adapter."""

    model: str
    adapter: str

    def request(self, body: Json) -> Json | None:
        """Return a copy of the request body, with the LoRA adapter's name as `model`. Return None
        if the body names other weights than the served ones. A body without a model name is meant
        for the served weights."""
        if body.get("model") not in (None, "", self.model):
            return None
        return body | {"model": self.adapter}

    def raw_request(self, raw: bytes) -> bytes | None:
        """Parse a request body, and return it as bytes, with the LoRA adapter's name as `model`.
        Return None if the body names other weights than the served ones, or is not a JSON
        object."""
        try:
            # orjson would turn integers beyond 64 bits into floats.
            parsed: Any = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        body = self.request(cast(Json, parsed)) if isinstance(parsed, dict) else None
        return None if body is None else json.dumps(body).encode()

    async def answer(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks of the engine's answer, with the model's name in place of the LoRA
        adapter's name.

        Only the field with the name changes. Texts of the model cannot contain the bytes of this
        field, because quotes within a JSON string are escaped.
        """
        old, new = _field(self.adapter), _field(self.model)
        rest = b""
        async for chunk in chunks:
            ready = (rest + chunk).replace(old, new)
            end = len(ready) - _num_begun(ready, old)
            ready, rest = ready[:end], ready[end:]
            if ready:
                yield ready
        if rest:
            yield rest


def _field(name: str) -> bytes:
    """Return the JSON field `model` with the value `name`, as the bytes that vLLM writes."""
    return b'"model":' + orjson.dumps(name)


def _num_begun(data: bytes, pattern: bytes) -> int:
    """Return how many bytes at the end of `data` may be the beginning of `pattern`.

    >>> _num_begun(b'{"id":1,"mod', b'"model":"a"')
    4
    """
    sizes = range(min(len(pattern) - 1, len(data)), 0, -1)
    return next((size for size in sizes if data.endswith(pattern[:size])), 0)
