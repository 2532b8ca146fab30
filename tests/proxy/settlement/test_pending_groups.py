"""Pending groups: no feedback that arrives in time is lost, and no group waits forever."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.pending_groups import PendingGroups

WINDOW_S = 10.0
NAMES = [f"g{number}" for number in range(4)]


def place(turn: int = 1, kind: Kind = Kind.CONTINUES, **more: str) -> Place:
    fields = {"session_id": "s", "parent_id": None, "asked_key": f"asked {turn}"} | more
    return Place(turn=turn, kind=kind, **fields)  # pyright: ignore[reportArgumentType]


def held(*turns: int) -> PendingGroups:
    """Return groups `g<turn>` that ended at time 0."""
    pending = PendingGroups(WINDOW_S)
    for turn in turns:
        pending.add(f"g{turn}", f"chatcmpl-{turn}", "key", place(turn))
        pending.group_recorded(f"g{turn}", 0.0, accepts_feedback=True)
    return pending


def test_a_group_is_held_for_the_window_and_then_sent_as_it_is() -> None:
    pending = held(1)
    assert pending.wait_s("g1", 4.0) == 6.0
    assert pending.wait_s("g1", 10.0) == 0.0
    assert pending.remove("g1") == 0.0 and "g1" not in pending


def test_without_a_window_a_group_waits_only_for_feedback_in_progress() -> None:
    pending = PendingGroups(0.0)
    pending.add("g1", "a", "key", None)
    pending.feedback_started("g1")
    pending.group_recorded("g1", 5.0, accepts_feedback=True)
    assert pending.wait_s("g1", 5.0) == math.inf and pending.accepts_feedback("g1")
    pending.feedback_finished("g1", -1.0)
    assert pending.wait_s("g1", 5.0) == 0.0 and pending.remove("g1") == -1.0
    assert not pending.accepts_feedback("g1")


def test_feedback_with_a_value_releases_the_group_and_a_comment_does_not() -> None:
    pending = held(1)
    pending.feedback_started("g1")
    pending.feedback_finished("g1", None)
    assert pending.wait_s("g1", 1.0) == 9.0
    pending.feedback_started("g1")
    pending.feedback_finished("g1", 0.5)
    assert pending.wait_s("g1", 1.0) == 0.0


def test_a_group_whose_served_sibling_has_no_reward_accepts_no_feedback_and_is_not_held() -> None:
    pending = PendingGroups(WINDOW_S)
    pending.group_recorded("g1", 0.0, accepts_feedback=False)
    assert pending.wait_s("g1", 0.0) == 0.0
    pending.feedback_started("g1")
    assert not pending.accepts_feedback("g1")
    pending.feedback_finished("g1", 1.0)
    assert pending.remove("g1") == 0.0


def test_an_answer_is_found_by_its_id_or_its_groups_id_and_only_by_its_own_app() -> None:
    pending = held(1)
    assert pending.find("chatcmpl-1", "key") == pending.find("g1", "key") == "g1"
    assert pending.find("chatcmpl-1", "other") is None
    pending.remove("g1")
    assert pending.find("chatcmpl-1", "key") is None


def test_a_restored_group_is_not_found_by_its_answer() -> None:
    pending = PendingGroups(WINDOW_S)
    pending.group_recorded("g1", 0.0, accepts_feedback=True)
    assert pending.find("g1", None) is None and "g1" in pending


def test_the_next_turn_releases_earlier_turns_of_its_own_session_only() -> None:
    pending = held(1, 2)
    pending.add("x", "b", "key", place(session_id="t"))
    pending.group_recorded("x", 0.0, accepts_feedback=True)
    assert pending.release_earlier_turns(place(2)) == ["g1"]
    assert pending.release_earlier_turns(place(3)) == ["g1", "g2"]
    assert pending.wait_s("g2", 0.0) == 0.0 and pending.wait_s("x", 0.0) == WINDOW_S


def test_a_regeneration_is_about_the_last_attempt_and_a_next_message_about_its_parent() -> None:
    pending = held(1, 2)
    again = place(2, Kind.REGENERATES, parent_id="g1")
    assert pending.preceding_group(again) == "g2"
    assert pending.release_earlier_turns(again) == ["g1", "g2"]
    assert pending.preceding_group(place(3, parent_id="g2")) == "g2"
    tools_result = place(2, parent_id="g2")
    assert pending.preceding_group(tools_result) is None
    assert pending.preceding_group(place(1, Kind.REGENERATES, asked_key="")) is None


class AnyOrder(RuleBasedStateMachine):
    """Events of four groups in any order, compared with a simple model."""

    @initialize(window_s=st.sampled_from([0.0, 5.0]))
    def begin(self, window_s: float) -> None:
        self.pending = PendingGroups(window_s)
        self.now = 0.0
        self.added = dict.fromkeys(NAMES, 0.0)
        self.in_progress = dict.fromkeys(NAMES, 0)
        self.ended_at: dict[str, float] = {}
        self.window_s = window_s
        self.sent: dict[str, float] = {}

    @rule(name=st.sampled_from(NAMES), turn=st.integers(1, 3))
    def answered(self, name: str, turn: int) -> None:
        if name not in self.sent:
            self.pending.add(name, f"id of {name}", None, place(turn))

    @rule(name=st.sampled_from(NAMES))
    def ends(self, name: str) -> None:
        if name not in self.ended_at:
            self.pending.group_recorded(name, self.now, accepts_feedback=True)
            self.ended_at[name] = self.now

    @rule(name=st.sampled_from(NAMES))
    def feedback_starts(self, name: str) -> None:
        self.in_progress[name] += name in self.pending
        self.pending.feedback_started(name)

    @rule(name=st.sampled_from(NAMES), amount=st.sampled_from([None, 1.0, -0.5]))
    def feedback_finishes(self, name: str, amount: float | None) -> None:
        if self.in_progress[name]:
            self.in_progress[name] -= 1
            assert self.pending.accepts_feedback(name), (
                "a group is not sent while feedback about it is in progress"
            )
            self.pending.feedback_finished(name, amount)
            self.added[name] += amount or 0.0

    @rule(turn=st.integers(1, 4))
    def next_turn_begins(self, turn: int) -> None:
        self.pending.release_earlier_turns(place(turn))

    @rule(seconds=st.sampled_from([0.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def due_groups_are_sent(self) -> None:
        for name in NAMES:
            if name in self.pending and self.pending.wait_s(name, self.now) == 0:
                self.sent[name] = self.pending.remove(name)

    @invariant()
    def no_group_waits_forever_or_is_sent_early(self) -> None:
        for name in NAMES:
            if name in self.pending:
                wait_s = self.pending.wait_s(name, self.now)
                is_open = name not in self.ended_at or self.in_progress[name] > 0
                assert (wait_s == math.inf) is is_open
                assert is_open or wait_s <= self.window_s

    @invariant()
    def all_feedback_is_added(self) -> None:
        assert self.sent == {name: self.added[name] for name in self.sent}


TestAnyOrder = AnyOrder.TestCase
