"""Search a request body for texts that must be redacted, without blocking the event loop."""

from __future__ import annotations

import asyncio

from fakevllm_adapters.privacy.redactor import LONG_BYTES, Redactor


async def finds_in_body(redactor: Redactor, raw: bytes) -> bool:
    """Return True if a request body has text that must be redacted. A long body is searched in
    another thread."""
    if not redactor or len(raw) < LONG_BYTES:
        return redactor.finds_in_body(raw)
    return await asyncio.to_thread(redactor.finds_in_body, raw)
