"""Captured calls of passive groups that have no rewards yet. Pure; the clock is passed in."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.types.calls import RecordedCall

MAX_OPEN_GROUPS = 10_000
MAX_OPEN_TOKENS = 20_000_000
"""Of all of them; beyond either the one goes that has been silent for longest."""
MAX_OPEN_S = 3600.0
"""A group whose last call is older has lost its client."""


@dataclass(slots=True)
class OpenGroup:
    calls: defaultdict[int, list[RecordedCall]] = field(
        default_factory=lambda: defaultdict[int, list[RecordedCall]](list)
    )
    """By sibling index."""
    last_call: float = 0.0


class OpenGroups:
    def __init__(self) -> None:
        self._groups: OrderedDict[str, OpenGroup] = OrderedDict()  # by their last call
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(self, sibling: SiblingRef, call: RecordedCall, now: float) -> int:
        """Its place among the sibling's calls, from 0."""
        group = self._groups.setdefault(sibling.group_id, OpenGroup())
        calls = group.calls[sibling.index]
        calls.append(call)
        self.num_tokens += call.num_tokens
        group.last_call = now
        self._groups.move_to_end(sibling.group_id)
        return len(calls) - 1

    def restore(
        self, group_id: str, calls: Mapping[int, Sequence[RecordedCall]], now: float
    ) -> None:
        """Of an earlier life; its client is given its whole time again."""
        for index, of_sibling in calls.items():
            for call in of_sibling:
                self.add(SiblingRef(group_id, index), call, now)

    def pop(self, group_id: str) -> OpenGroup | None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            self.num_tokens -= sum(call.num_tokens for own in group.calls.values() for call in own)
        return group

    def take_left(self, now: float) -> dict[str, str]:
        """Those whose end will not come, or for which there is no room, with which it is; they are
        open no more."""
        left: dict[str, str] = {}
        while self._groups:
            group_id, oldest = next(iter(self._groups.items()))
            is_full = len(self._groups) > MAX_OPEN_GROUPS or self.num_tokens > MAX_OPEN_TOKENS
            if not is_full and now - oldest.last_call <= MAX_OPEN_S:
                break
            self.pop(group_id)
            left[group_id] = "pool_full" if is_full else "never_ended"
        return left
