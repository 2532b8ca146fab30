"""A captured call as a row, and back. Exact: what is read is what was written, bit by bit."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import orjson

from fakevllm_server.allowed import Allowed
from fakevllm_server.calls import RecordedCall, VersionSpan

CALL_COLUMNS = "prompt_ids, response_ids, logprobs, facts_json, digest"
CallRow = tuple[bytes, bytes, bytes | None, str, bytes]


class CorruptCall(Exception):
    """A row is not what was written."""


def call_row(call: RecordedCall) -> CallRow:
    """The values of CALL_COLUMNS."""
    logprobs = None if call.logprobs is None else array("d", call.logprobs).tobytes()
    facts = orjson.dumps(
        {
            "versions": [[span.version, span.start, span.end] for span in call.versions],
            "temperature": call.temperature,
            "finish_reason": call.finish_reason,
            "untrainable": call.untrainable,
            "allowed": None if call.allowed is None else call.allowed.to_wire(),
        }
    ).decode()
    parts = (
        array("i", call.prompt_ids).tobytes(),
        array("i", call.response_ids).tobytes(),
        logprobs,
        facts,
    )
    return (*parts, _digest(*parts))


def call_of(row: CallRow) -> RecordedCall:
    """Raises CorruptCall."""
    prompt_ids, response_ids, logprobs, facts_json, digest = row
    if _digest(prompt_ids, response_ids, logprobs, facts_json) != digest:
        raise CorruptCall
    facts: dict[str, Any] = orjson.loads(facts_json)
    allowed = facts["allowed"]
    return RecordedCall(
        prompt_ids=array("i", prompt_ids).tolist(),
        response_ids=array("i", response_ids).tolist(),
        logprobs=None if logprobs is None else array("d", logprobs).tolist(),
        versions=[VersionSpan(*span) for span in facts["versions"]],
        temperature=facts["temperature"],
        finish_reason=facts["finish_reason"],
        untrainable=facts["untrainable"],
        allowed=None if allowed is None else Allowed.from_wire(allowed),
    )


def _digest(*parts: bytes | str | None) -> bytes:
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part or b""
        size = -1 if part is None else len(raw)
        hashed.update(size.to_bytes(8, "little", signed=True) + raw)
    return hashed.digest()
