"""The ids of ended groups. A new request with the id of an ended group is refused with a reason.
Only the newest ids are in memory. The caller provides a function that looks up all other ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

MAX_REMEMBERED = 20_000
"""Maximum number of ids in memory. Older ids, and ids from before a restart, are looked up in the
journal."""


class EndedGroupIds:
    """The ids of ended groups, which no other group may use."""

    def __init__(self, look_up: Callable[[str], str | None]) -> None:
        """Create the object, with no ids in memory.

        The function `look_up` is called for each id that is not in memory. It returns the reason
        why the id is refused, or None for a new id.
        """
        self._look_up = look_up
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of ended groups that are in memory, oldest first."""
        return iter(self._reasons)

    def refusal_of(self, group_id: str) -> str | None:
        """Return the reason why a group id is refused, or None if the id is new."""
        return self._reasons.get(group_id) or self._look_up(group_id)

    def is_new(self, group_id: str) -> bool:
        return self.refusal_of(group_id) is None

    def remember(self, group_id: str, reason: str | None = None) -> None:
        """Store the id of an ended group. Later requests with this id are refused with `reason`, or
        with "already_ended" if `reason` is None."""
        self._reasons[group_id] = reason or "already_ended"
        if len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
