"""Ids of groups that may not come again, each with the reason. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MAX_REMEMBERED = 20_000
"""Of this life; older ones, and those of earlier lives, are looked up."""


class EndedIds:
    def __init__(self, why_ended: Callable[[str], str | None]) -> None:
        """`why_ended` knows those that are not remembered."""
        self._why_ended = why_ended
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def refusal_of(self, group_id: str) -> str | None:
        """Why the id may not come again; None where it may."""
        return self._reasons.get(group_id) or self._why_ended(group_id)

    def is_new(self, group_id: str) -> bool:
        return self.refusal_of(group_id) is None

    def remember(self, group_id: str, reason: str | None = None) -> None:
        self._reasons[group_id] = reason or "already_ended"
        if len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
