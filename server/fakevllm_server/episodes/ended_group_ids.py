"""The ids of groups that have ended and may not come again, each with a reason. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MAX_REMEMBERED = 20_000
"""Number of ids to remember. Older ids, and those from before a restart, are looked up."""


class EndedGroupIds:
    """Knows which group ids are used up."""

    def __init__(self, look_up: Callable[[str], str | None]) -> None:
        """`look_up` returns the reason for an id that is not remembered, or None for a new id."""
        self._look_up = look_up
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def refusal_of(self, group_id: str) -> str | None:
        """Return why the id may not come again; None if it may."""
        return self._reasons.get(group_id) or self._look_up(group_id)

    def is_new(self, group_id: str) -> bool:
        return self.refusal_of(group_id) is None

    def remember(self, group_id: str, reason: str | None = None) -> None:
        """Refuse this id from now on, by default as `already_ended`."""
        self._reasons[group_id] = reason or "already_ended"
        if len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
