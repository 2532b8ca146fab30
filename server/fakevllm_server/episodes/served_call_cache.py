"""Cache of calls that were served to apps, for later turns of their conversations. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from fakevllm_server.types.calls import RecordedCall

MAX_TOKENS = 1_000_000
"""Maximum number of cached tokens. Above this, the oldest calls are removed."""


class ServedCalls:
    """A cache of the call of the served sibling, for each recent passive group."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._calls: OrderedDict[str, RecordedCall] = OrderedDict()
        self._num_tokens = 0

    def remember(self, group_id: str, calls: Sequence[RecordedCall]) -> None:
        """Store the call of a group's served sibling. Each sibling of a passive group has one
        call."""
        if len(calls) != 1 or group_id in self._calls:
            return
        self._calls[group_id] = replace(calls[0], allowed=None)
        self._num_tokens += _length(calls[0])
        while self._num_tokens > self._max_tokens:
            _, oldest = self._calls.popitem(last=False)
            self._num_tokens -= _length(oldest)

    def find(self, group_id: str | None) -> RecordedCall | None:
        """Return the call of a group's served sibling; None if it is not cached."""
        return None if group_id is None else self._calls.get(group_id)


def _length(call: RecordedCall) -> int:
    return len(call.prompt_ids) + len(call.response_ids)
