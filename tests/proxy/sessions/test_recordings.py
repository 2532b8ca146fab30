"""Recorded conversations of many users at once find their sessions and turns again.

What their content cannot tell is left out here and listed in docs/sessions.md.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.proxy.sessions.crowd import Copy, Crowd, Told, copies, with_counted_ids
from tests.proxy.sessions.recordings import IS_THERE, Recorded, messages_in, sessions

pytestmark = pytest.mark.skipif(not IS_THERE, reason="recorded traffic is not part of the project")

NUM_USERS = 4


@pytest.fixture(scope="module")
def everybody() -> list[Copy]:
    return copies(list(sessions().values()), NUM_USERS)


def played(crowd: list[Copy], seed: int, *, with_headers: bool) -> Crowd:
    found = Crowd(with_headers=with_headers, chance=random.Random(seed))
    found.play(crowd)
    return found


def homes(crowd: Crowd) -> dict[str, str]:
    """The session of each conversation: where its first main call was put."""
    return {
        name: next((one for one in told if not one.asked.is_side), told[0]).place.session_id
        for name, told in crowd.told.items()
    }


def wrong(crowd: Crowd) -> Iterator[tuple[str, int, Told]]:
    """Requests in another session than theirs, in one of two conversations, or of another turn."""
    home = homes(crowd)
    shared = Counter(home.values())
    for name, told in crowd.told.items():
        for at, one in enumerate(told):
            place = one.place
            is_home = place.session_id == home[name] and shared[home[name]] == 1
            if not is_home or place.turn != one.asked.turn:
                yield name, at, one


class Tellable:
    """Whether the content of a request says whose it is."""

    def __init__(self, crowd: list[Copy]) -> None:
        self._copies = {copy.name: copy for copy in crowd}
        self._openings = Counter(copy.opening for copy in crowd)

    def is_opened_alone(self, copy: Copy) -> bool:
        return self._openings[copy.opening] == 1

    def __call__(self, name: str, at: int) -> bool:
        copy = self._copies[name]
        one = copy.requests[at]
        is_unique = self.is_opened_alone(copy)
        if one.is_side:
            return is_unique or any(answer in str(one.body) for answer in copy.answers)
        if any(earlier.body == one.body for earlier in copy.requests[:at]):
            return is_unique and one.headers.get(b"x-stainless-retry-count", b"0") != b"0"
        return True


@pytest.mark.parametrize("seed", range(3))
def test_without_headers_the_content_tells_session_and_turn(
    everybody: list[Copy], seed: int
) -> None:
    tells = Tellable(everybody)
    crowd = played(everybody, seed, with_headers=False)
    all_told = [(name, at) for name, told in crowd.told.items() for at in range(len(told))]
    tellable = [one for one in all_told if tells(*one)]
    missed = [(name, at, one.place) for name, at, one in wrong(crowd) if tells(name, at)]
    assert len(tellable) > 0.75 * len(all_told)
    assert len(missed) <= 0.01 * len(tellable), missed


def test_all_main_calls_except_resends_are_found(everybody: list[Copy]) -> None:
    crowd = played(everybody, 0, with_headers=False)
    tells = Tellable(everybody)
    missed = [one for one in wrong(crowd) if tells(*one[:2]) and not one[2].asked.is_side]
    assert missed == []
    deep = [one for told in crowd.told.values() for one in told if _has_answers(one.asked)]
    assert len(deep) > 100


def test_without_ids_of_calls_the_words_tell(everybody: list[Copy]) -> None:
    tells = Tellable(everybody)
    own_words = [with_counted_ids(copy) for copy in everybody if tells.is_opened_alone(copy)]
    crowd = played(own_words, 2, with_headers=False)
    missed = [one for one in wrong(crowd) if tells(*one[:2])]
    assert missed == []
    assert sum(len(told) > 1 for told in crowd.told.values()) > 40


def test_with_headers_every_request_is_found(everybody: list[Copy]) -> None:
    named = [copy for copy in everybody if copy.requests[0].is_named]
    crowd = played(named, 1, with_headers=True)
    assert len(named) > 100
    assert list(wrong(crowd)) == []


def _has_answers(one: Recorded) -> bool:
    return any(
        message.get("role") == "assistant" or message.get("type") == "function_call"
        for message in messages_in(one.body)
    )
