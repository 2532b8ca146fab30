"""Groups that have not been sent yet: what is said of their answers now counts in the group itself.
Pure; the clock is passed in."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from fakevllm.sessions.types import Kind, Place


@dataclass(slots=True)
class _Group:
    answer_id: str | None
    app_key: str | None
    place: Place | None
    is_restored: bool = False
    """An earlier life has answered it: whose it is tells the ledger alone."""
    until: float | None = None
    """None: the group is not over yet, and is not sent anyway."""
    takes: bool = True
    """Whether what is heard may count in it."""
    num_hearing: int = 0
    added: float = 0.0
    is_released: bool = False


class PendingGroups:
    """From an app's answer to the group's sending."""

    def __init__(self, window_s: float = 0.0) -> None:
        self._window_s = window_s
        # Bounded by the groups that are open, and by the window.
        self._groups: dict[str, _Group] = {}
        self._by_answer: dict[str, str] = {}
        self._by_session: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def answered(
        self, group_id: str, answer_id: str | None, app_key: str | None, place: Place | None
    ) -> None:
        """The app has got its answer, or is about to; the first call counts."""
        if group_id in self._groups:
            return
        self._groups[group_id] = _Group(answer_id, app_key, place)
        if answer_id is not None:
            self._by_answer[answer_id] = group_id
        if place is not None:
            self._by_session[place.session_id][group_id] = None

    def close(self, group_id: str, now: float, *, takes: bool) -> None:
        """The group is in the ledger with its rewards, and is to be sent. `takes`: whether the
        served sibling has a reward to add to."""
        restored = _Group(None, None, None, is_restored=True)
        group = self._groups.setdefault(group_id, restored)
        group.until = now + (self._window_s if takes else 0.0)
        group.takes = takes

    def find(self, name: str, app_key: str | None) -> str | None:
        """The group whose answer that app calls so, or by the group's own id."""
        group_id = self._by_answer.get(name, name)
        group = self._groups.get(group_id)
        if group is None or group.is_restored or group.app_key != app_key:
            return None
        return group_id

    def is_closed(self, group_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is None or group.until is not None

    def hear(self, group_id: str) -> None:
        """Somebody says something; until `heard` the group is not sent."""
        if group_id in self._groups:
            self._groups[group_id].num_hearing += 1

    def takes(self, group_id: str) -> bool:
        """Whether what is being heard may count in the group."""
        group = self._groups.get(group_id)
        return group is not None and group.takes

    def heard(self, group_id: str, amount: float | None) -> None:
        """The amount counts in the group, which then waits for nothing more."""
        group = self._groups.get(group_id)
        if group is None:
            return
        group.num_hearing -= 1
        if amount is not None and group.takes:
            group.added += amount
            group.is_released = True

    def before(self, place: Place) -> str | None:
        """The group of which a request that stands there says something: another try of the same,
        or the next message."""
        if place.kind is Kind.REGENERATES:
            session = self._by_session.get(place.session_id, ())
            same = [one for one in session if self._asks_again(one, place)]
            return same[-1] if same else None
        group = self._groups.get(place.parent_id or "")
        is_next = group is not None and group.place is not None and group.place.turn < place.turn
        return place.parent_id if is_next else None

    def moved_on(self, place: Place) -> list[str]:
        """The session's earlier turns need not wait any more; who they are."""
        released = [
            one
            for one in self._by_session.get(place.session_id, ())
            if self._asks_again(one, place) or self._turn(one) < place.turn
        ]
        for one in released:
            self._groups[one].is_released = True
        return released

    def wait_s(self, group_id: str, now: float) -> float:
        """How long the group is held yet; without end while something is said of it."""
        group = self._groups[group_id]
        if group.until is None or group.num_hearing > 0:
            return math.inf
        return 0.0 if group.is_released else max(0.0, group.until - now)

    def send(self, group_id: str) -> float:
        """From now on it takes nothing more. What is added to the reward of its served sibling."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return 0.0
        if group.answer_id is not None and self._by_answer.get(group.answer_id) == group_id:
            del self._by_answer[group.answer_id]
        if group.place is not None:
            session = self._by_session[group.place.session_id]
            session.pop(group_id, None)
            if not session:
                del self._by_session[group.place.session_id]
        return group.added

    def _turn(self, group_id: str) -> int:
        place = self._groups[group_id].place
        return place.turn if place is not None else 0

    def _asks_again(self, group_id: str, place: Place) -> bool:
        """Whether it was asked the same, which `place` asks once more."""
        own = self._groups[group_id].place
        asks_again = place.kind is Kind.REGENERATES and place.asked_key != ""
        return asks_again and own is not None and own.asked_key == place.asked_key
