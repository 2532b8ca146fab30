"""Calls and groups for tests of the server's pure parts."""

from __future__ import annotations

from fakevllm_server.types.calls import RecordedCall, VersionSpan


def call(
    version: int = 0, untrainable: str | None = None, ids: tuple[int, ...] = (5, 6)
) -> RecordedCall:
    return RecordedCall(
        prompt_ids=[1, 2, 3],
        response_ids=list(ids),
        logprobs=[-0.5] * len(ids),
        versions=[VersionSpan(version, 0, len(ids))],
        temperature=1.0,
        finish_reason="stop",
        untrainable=untrainable,
    )
