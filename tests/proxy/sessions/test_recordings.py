"""Recorded conversations of many concurrent users are placed in their sessions and turns.

Requests whose content is not enough to place them are excluded. docs/sessions.md lists them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.proxy.sessions.concurrent_users import (
    ConcurrentUsers,
    Copy,
    PlacedRequest,
    copies,
    with_counted_ids,
)
from tests.proxy.sessions.recordings import IS_THERE, Recorded, messages_in, sessions

pytestmark = pytest.mark.skipif(not IS_THERE, reason="recorded traffic is not part of the project")

NUM_USERS = 4


@pytest.fixture(scope="module")
def conversations() -> list[Copy]:
    return copies(list(sessions().values()), NUM_USERS)


def play(conversations: list[Copy], seed: int, *, with_headers: bool) -> ConcurrentUsers:
    users = ConcurrentUsers(with_headers=with_headers, rng=random.Random(seed))
    users.play(conversations)
    return users


def expected_sessions(users: ConcurrentUsers) -> dict[str, str]:
    """Return the session of each conversation, which is that of its first main call."""
    return {
        name: next((one for one in placed if not one.recorded.is_side), placed[0]).place.session_id
        for name, placed in users.placed.items()
    }


def misplaced(users: ConcurrentUsers) -> Iterator[tuple[str, int, PlacedRequest]]:
    """Yield the requests that were placed in a wrong or shared session, or in a wrong turn."""
    expected = expected_sessions(users)
    shared = Counter(expected.values())
    for name, placed in users.placed.items():
        for at, one in enumerate(placed):
            place = one.place
            is_right_session = place.session_id == expected[name] and shared[expected[name]] == 1
            if not is_right_session or place.turn != one.recorded.turn:
                yield name, at, one


class Placeable:
    """Decides whether the content of a request is enough to find its session."""

    def __init__(self, conversations: list[Copy]) -> None:
        self._copies = {copy.name: copy for copy in conversations}
        self._openings = Counter(copy.opening for copy in conversations)

    def has_unique_opening(self, copy: Copy) -> bool:
        return self._openings[copy.opening] == 1

    def __call__(self, name: str, at: int) -> bool:
        copy = self._copies[name]
        one = copy.requests[at]
        is_unique = self.has_unique_opening(copy)
        if one.is_side:
            return is_unique or any(answer in str(one.body) for answer in copy.answers)
        if any(earlier.body == one.body for earlier in copy.requests[:at]):
            return is_unique and one.headers.get(b"x-stainless-retry-count", b"0") != b"0"
        return True


@pytest.mark.parametrize("seed", range(3))
def test_requests_without_headers_are_placed_by_content(
    conversations: list[Copy], seed: int
) -> None:
    can_place = Placeable(conversations)
    users = play(conversations, seed, with_headers=False)
    all_requests = [
        (name, at) for name, placed in users.placed.items() for at in range(len(placed))
    ]
    placeable = [one for one in all_requests if can_place(*one)]
    missed = [(name, at, one.place) for name, at, one in misplaced(users) if can_place(name, at)]
    assert len(placeable) > 0.75 * len(all_requests)
    assert len(missed) <= 0.01 * len(placeable), missed


def test_all_main_calls_except_resends_are_found(conversations: list[Copy]) -> None:
    users = play(conversations, 0, with_headers=False)
    can_place = Placeable(conversations)
    missed = [
        one for one in misplaced(users) if can_place(*one[:2]) and not one[2].recorded.is_side
    ]
    assert missed == []
    deep = [one for placed in users.placed.values() for one in placed if _has_answers(one.recorded)]
    assert len(deep) > 100


def test_requests_without_unique_call_ids_are_placed_by_text(conversations: list[Copy]) -> None:
    can_place = Placeable(conversations)
    unique_openings = [
        with_counted_ids(copy) for copy in conversations if can_place.has_unique_opening(copy)
    ]
    users = play(unique_openings, 2, with_headers=False)
    missed = [one for one in misplaced(users) if can_place(*one[:2])]
    assert missed == []
    assert sum(len(placed) > 1 for placed in users.placed.values()) > 40


def test_with_headers_every_request_is_found(conversations: list[Copy]) -> None:
    named = [copy for copy in conversations if copy.requests[0].is_named]
    users = play(named, 1, with_headers=True)
    assert len(named) > 100
    assert list(misplaced(users)) == []


def _has_answers(one: Recorded) -> bool:
    return any(
        message.get("role") == "assistant" or message.get("type") == "function_call"
        for message in messages_in(one.body)
    )
