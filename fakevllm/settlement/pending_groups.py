"""The groups (requests with all their sampled answers) whose rewards have not been sent to the
server yet. Until the rewards of a group are sent, feedback about the answer that the app got can
still be added to this answer's reward. This module does no I/O, and gets the time as an argument.
"""

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
    """Whether an earlier proxy process answered the request. If so, only the ledger knows which app
    got the answer."""
    send_at: float | None = None
    """Time at which the group is sent if no feedback arrives; None if the group is not in the
    ledger yet."""
    accepts_feedback: bool = True
    """Whether feedback may be added to the group's reward."""
    num_in_progress: int = 0
    """Number of feedback items about the answer that are being processed."""
    added: float = 0.0
    """Sum of the amounts of all feedback so far. This sum is added to the reward of the served
    sibling."""
    is_released: bool = False
    """Whether the group no longer waits for feedback, and may be sent before `send_at`."""


class PendingGroups:
    """The groups whose app has been answered, and whose rewards have not been sent to the server
    yet. A group is a request with all its sampled answers."""

    def __init__(self, window_s: float = 0.0) -> None:
        """Create an empty collection. `window_s` is the feedback window: the seconds for which a
        scored group (a request with its answers) waits for feedback before it is sent.
        """
        self._window_s = window_s
        # Bounded by the number of open groups, and by the groups within the window.
        self._groups: dict[str, _Group] = {}
        self._by_answer: dict[str, str] = {}
        self._by_session: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(
        self, group_id: str, answer_id: str | None, app_key: str | None, place: Place | None
    ) -> None:
        """Add a group (a request with its answers) to the groups whose rewards were not sent yet.
        Call this method when the app gets its answer. Only the first call for a group has an
        effect."""
        if group_id in self._groups:
            return
        self._groups[group_id] = _Group(answer_id, app_key, place)
        if answer_id is not None:
            self._by_answer[answer_id] = group_id
        if place is not None:
            self._by_session[place.session_id][group_id] = None

    def group_recorded(self, group_id: str, now: float, *, accepts_feedback: bool) -> None:
        """Record that the group is in the ledger with its rewards and can be sent. The ledger is
        the proxy's database.

        `accepts_feedback` is True if the served sibling (the answer that the app got) has a reward
        to which feedback can be added. If `accepts_feedback` is False, the group does not wait for
        feedback.
        """
        restored = _Group(None, None, None, is_restored=True)
        group = self._groups.setdefault(group_id, restored)
        group.send_at = now + (self._window_s if accepts_feedback else 0.0)
        group.accepts_feedback = accepts_feedback

    def find(self, name: str, app_key: str | None) -> str | None:
        """Return the id of the group that an app means by `name`. The argument `name` is either the
        id of the answer that the app got, or the id of the group.

        Return None if this collection has no such group of the app with the key `app_key`. Groups
        that an earlier proxy process answered are not found.
        """
        group_id = self._by_answer.get(name, name)
        group = self._groups.get(group_id)
        if group is None or group.is_restored or group.app_key != app_key:
            return None
        return group_id

    def is_recorded(self, group_id: str) -> bool:
        """Return True if the group is in the ledger (the proxy's database). The result is also True
        for recorded groups that are no longer in this collection, because they were sent or
        forgotten."""
        group = self._groups.get(group_id)
        return group is None or group.send_at is not None

    def feedback_started(self, group_id: str) -> None:
        """Hold the group, because feedback about it is being processed. The group is not sent
        before `feedback_finished` is called for the same feedback."""
        if group_id in self._groups:
            self._groups[group_id].num_in_progress += 1

    def feedback_finished(self, group_id: str, amount: float | None) -> None:
        """Record that one item of feedback about the group has been processed. From then on, this
        item no longer delays the group.

        If `amount` is not None, add it to the reward of the answer that the app got. The group may
        then be sent before the end of the feedback window.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        group.num_in_progress -= 1
        if amount is not None and group.accepts_feedback:
            group.added += amount
            group.is_released = True

    def accepts_feedback(self, group_id: str) -> bool:
        """Return True if feedback may still be added to the group's reward."""
        group = self._groups.get(group_id)
        return group is not None and group.accepts_feedback

    def preceding_group(self, place: Place) -> str | None:
        """Return the id of the group whose answer a new request judges. A new request is implicit
        feedback about an earlier answer of its session. `place` is the position of the new request
        in its session.

        If the request asks for another answer to the same question, the result is the latest group
        of this question. Otherwise the result is the group whose answer the request continues in a
        new turn. The result is None if this collection has no such group.
        """
        if place.kind is Kind.REGENERATES:
            session = self._by_session.get(place.session_id, ())
            attempts = [other for other in session if self._is_same_request(other, place)]
            return attempts[-1] if attempts else None
        group = self._groups.get(place.parent_id or "")
        is_next = group is not None and group.place is not None and group.place.turn < place.turn
        return place.parent_id if is_next else None

    def release_earlier_turns(self, place: Place) -> list[str]:
        """Release the groups (requests with their answers) that a new request follows: they no
        longer wait for feedback before they are sent. Return the ids of these groups.

        `place` is the position of the new request in its session. The request follows all groups of
        earlier turns. If the request asks for another answer to a question, it also follows the
        groups of this question.
        """
        released = [
            group_id
            for group_id in self._by_session.get(place.session_id, ())
            if self._is_same_request(group_id, place) or self._turn(group_id) < place.turn
        ]
        for group_id in released:
            self._groups[group_id].is_released = True
        return released

    def wait_s(self, group_id: str, now: float) -> float:
        """Return the number of seconds until the group may be sent to the server. The result is
        infinite in two cases: feedback about the group is still being processed, or the group is
        not in the ledger (the proxy's database) yet."""
        group = self._groups[group_id]
        if group.send_at is None or group.num_in_progress > 0:
            return math.inf
        return 0.0 if group.is_released else max(0.0, group.send_at - now)

    def remove(self, group_id: str) -> float:
        """Remove a group that is about to be sent or is forgotten. Return the sum of the amounts of
        all feedback about the group. The caller adds this sum to the reward of the served sibling
        (the answer that the app got)."""
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

    def _is_same_request(self, group_id: str, place: Place) -> bool:
        """Return True if the new request at `place` (a position in a session) asks for another
        answer to this group's question."""
        own = self._groups[group_id].place
        regenerates = place.kind is Kind.REGENERATES and place.asked_key != ""
        return regenerates and own is not None and own.asked_key == place.asked_key
