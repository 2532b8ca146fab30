"""Cache of the model calls whose answers apps received. Later turns of the same conversations are
compared with these calls. This module does no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from fakevllm_server.types.calls import RecordedCall

MAX_TOKENS = 1_000_000
"""Maximum number of cached tokens. If there are more tokens, the oldest calls are removed."""


class ServedCalls:
    """A cache with one model call for each recent passive group (the answers to one request of an
    app). The cached call is the call whose answer the app received."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._calls: OrderedDict[str, RecordedCall] = OrderedDict()
        self._num_tokens = 0

    def remember(self, group_id: str, calls: Sequence[RecordedCall]) -> None:
        """Store the model call whose answer the app received. `calls` has the model calls behind
        this answer. If there is not exactly one call, store nothing."""
        if len(calls) != 1 or group_id in self._calls:
            return
        self._calls[group_id] = replace(calls[0], allowed=None)
        self._num_tokens += _length(calls[0])
        while self._num_tokens > self._max_tokens:
            _, oldest = self._calls.popitem(last=False)
            self._num_tokens -= _length(oldest)

    def find(self, group_id: str | None) -> RecordedCall | None:
        """Return the model call whose answer the app received, for the group with this id. A group
        has the answers to one request. Return None if the call is not cached."""
        return None if group_id is None else self._calls.get(group_id)

    def forget(self, group_id: str) -> None:
        """Remove the model call of this group, if it is cached."""
        call = self._calls.pop(group_id, None)
        if call is not None:
            self._num_tokens -= _length(call)


def _length(call: RecordedCall) -> int:
    return len(call.prompt_ids) + len(call.response_ids)
