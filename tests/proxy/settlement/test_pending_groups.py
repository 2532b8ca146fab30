"""Groups that wait for what is said of them: nothing heard in time is lost, and none waits for
ever."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.pending_groups import PendingGroups

WINDOW_S = 10.0
NAMES = [f"g{number}" for number in range(4)]


def place(turn: int = 1, kind: Kind = Kind.CONTINUES, **more: str) -> Place:
    told = {"session_id": "s", "parent_id": None, "asked_key": f"asked {turn}"} | more
    return Place(turn=turn, kind=kind, **told)  # pyright: ignore[reportArgumentType]


def held(*turns: int) -> PendingGroups:
    """`g<turn>`, each over at 0."""
    holding = PendingGroups(WINDOW_S)
    for turn in turns:
        holding.answered(f"g{turn}", f"chatcmpl-{turn}", "key", place(turn))
        holding.close(f"g{turn}", 0.0, takes=True)
    return holding


def test_a_group_is_held_for_the_window_and_then_sent_as_it_is() -> None:
    holding = held(1)
    assert holding.wait_s("g1", 4.0) == 6.0
    assert holding.wait_s("g1", 10.0) == 0.0
    assert holding.send("g1") == 0.0 and "g1" not in holding


def test_without_a_window_a_group_waits_only_for_what_is_being_said() -> None:
    holding = PendingGroups(0.0)
    holding.answered("g1", "a", "key", None)
    holding.hear("g1")
    holding.close("g1", 5.0, takes=True)
    assert holding.wait_s("g1", 5.0) == math.inf and holding.takes("g1")
    holding.heard("g1", -1.0)
    assert holding.wait_s("g1", 5.0) == 0.0 and holding.send("g1") == -1.0
    assert not holding.takes("g1")


def test_feedback_ends_the_wait_and_a_mere_comment_does_not() -> None:
    holding = held(1)
    holding.hear("g1")
    holding.heard("g1", None)
    assert holding.wait_s("g1", 1.0) == 9.0
    holding.hear("g1")
    holding.heard("g1", 0.5)
    assert holding.wait_s("g1", 1.0) == 0.0


def test_a_served_answer_without_a_reward_takes_nothing_and_is_not_waited_for() -> None:
    holding = PendingGroups(WINDOW_S)
    holding.close("g1", 0.0, takes=False)
    assert holding.wait_s("g1", 0.0) == 0.0
    holding.hear("g1")
    assert not holding.takes("g1")
    holding.heard("g1", 1.0)
    assert holding.send("g1") == 0.0


def test_only_its_own_app_finds_an_answer_by_its_id_or_by_the_group_s() -> None:
    holding = held(1)
    assert holding.find("chatcmpl-1", "key") == holding.find("g1", "key") == "g1"
    assert holding.find("chatcmpl-1", "other") is None
    holding.send("g1")
    assert holding.find("chatcmpl-1", "key") is None


def test_a_group_that_an_earlier_life_answered_is_found_by_nobody_here() -> None:
    holding = PendingGroups(WINDOW_S)
    holding.close("g1", 0.0, takes=True)
    assert holding.find("g1", None) is None and "g1" in holding


def test_the_next_turn_releases_the_turns_before_it_and_no_other_session() -> None:
    holding = held(1, 2)
    holding.answered("x", "b", "key", place(session_id="t"))
    holding.close("x", 0.0, takes=True)
    assert holding.moved_on(place(2)) == ["g1"]
    assert holding.moved_on(place(3)) == ["g1", "g2"]
    assert holding.wait_s("g2", 0.0) == 0.0 and holding.wait_s("x", 0.0) == WINDOW_S


def test_another_try_says_something_of_the_one_before_and_the_next_message_of_its_parent() -> None:
    holding = held(1, 2)
    again = place(2, Kind.REGENERATES, parent_id="g1")
    assert holding.before(again) == "g2"
    assert holding.moved_on(again) == ["g1", "g2"]
    assert holding.before(place(3, parent_id="g2")) == "g2"
    tools_result = place(2, parent_id="g2")
    assert holding.before(tools_result) is None
    assert holding.before(place(1, Kind.REGENERATES, asked_key="")) is None


class AnyOrder(RuleBasedStateMachine):
    """Events of four groups, in any order, against a plain account of them."""

    @initialize(window_s=st.sampled_from([0.0, 5.0]))
    def begin(self, window_s: float) -> None:
        self.holding = PendingGroups(window_s)
        self.now = 0.0
        self.added = dict.fromkeys(NAMES, 0.0)
        self.hearing = dict.fromkeys(NAMES, 0)
        self.over_at: dict[str, float] = {}
        self.window_s = window_s
        self.sent: dict[str, float] = {}

    @rule(name=st.sampled_from(NAMES), turn=st.integers(1, 3))
    def answered(self, name: str, turn: int) -> None:
        if name not in self.sent:
            self.holding.answered(name, f"id of {name}", None, place(turn))

    @rule(name=st.sampled_from(NAMES))
    def over(self, name: str) -> None:
        if name not in self.over_at:
            self.holding.close(name, self.now, takes=True)
            self.over_at[name] = self.now

    @rule(name=st.sampled_from(NAMES))
    def hear(self, name: str) -> None:
        self.hearing[name] += name in self.holding
        self.holding.hear(name)

    @rule(name=st.sampled_from(NAMES), amount=st.sampled_from([None, 1.0, -0.5]))
    def heard(self, name: str, amount: float | None) -> None:
        if self.hearing[name]:
            self.hearing[name] -= 1
            assert self.holding.takes(name), "while it is heard it is not sent"
            self.holding.heard(name, amount)
            self.added[name] += amount or 0.0

    @rule(turn=st.integers(1, 4))
    def moves_on(self, turn: int) -> None:
        self.holding.moved_on(place(turn))

    @rule(seconds=st.sampled_from([0.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def send_what_is_due(self) -> None:
        for name in NAMES:
            if name in self.holding and self.holding.wait_s(name, self.now) == 0:
                self.sent[name] = self.holding.send(name)

    @invariant()
    def none_waits_for_ever_and_none_is_sent_early(self) -> None:
        for name in NAMES:
            if name in self.holding:
                wait_s = self.holding.wait_s(name, self.now)
                is_open = name not in self.over_at or self.hearing[name] > 0
                assert (wait_s == math.inf) is is_open
                assert is_open or wait_s <= self.window_s

    @invariant()
    def what_was_heard_is_what_was_added(self) -> None:
        assert self.sent == {name: self.added[name] for name in self.sent}


TestAnyOrder = AnyOrder.TestCase
