"""In any order of events, a group has one answer and one end, and does nothing after it."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fakevllm.config.serving import OnDisconnect, PolicyName, ServeRules
from fakevllm.groups.sibling_scheduler import (
    Abort,
    AppState,
    BreakOff,
    Cancel,
    Decision,
    GroupScheduler,
    Refuse,
    Relay,
    Score,
    Serve,
    Settle,
    Start,
)
from fakevllm.transport.request import SiblingOutcome

OK, HIDDEN = SiblingOutcome.ANSWERED, SiblingOutcome.HIDDEN


def rules_of(
    policy: PolicyName, quorum: int | None, random_fraction: float, on_disconnect: OnDisconnect
) -> ServeRules:
    if policy != "best":
        return ServeRules(policy=policy, on_disconnect=on_disconnect)
    return ServeRules(quorum=quorum, random_fraction=random_fraction, on_disconnect=on_disconnect)


POLICIES: list[PolicyName] = ["best", "lead", "greedy"]
ON_DISCONNECT: list[OnDisconnect] = ["cancel", "finish"]
RULES = st.builds(
    rules_of,
    st.sampled_from(POLICIES),
    st.one_of(st.none(), st.integers(1, 6)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(ON_DISCONNECT),
)


class AnyOrder(RuleBasedStateMachine):
    """An executor of the decisions that checks that each of them can be executed."""

    @initialize(num=st.integers(2, 6), rules=RULES, streamed=st.booleans(), seed=st.integers(0, 9))
    def begins(self, num: int, rules: ServeRules, streamed: bool, seed: int) -> None:
        self.scheduler = GroupScheduler(num, rules, random.Random(seed), can_stream=streamed)
        self.num = num
        self.is_cancelled_with_its_app = rules.on_disconnect == "cancel"
        self.started: set[int] = set()
        self.running: set[int] = set()
        self.answered: set[int] = set()
        self.servable: set[int] = set()
        self.to_score: tuple[int, ...] | None = None
        self.is_relaying = self.is_sending = self.has_left = self.is_settled = False
        self.num_answers = self.num_ends = 0
        self.execute(self.scheduler.begin())

    def execute(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert self.num_ends == 0, "no decision follows the end"
            match decision:
                case Relay():
                    self.start((0,))
                    self.is_relaying = True
                case Start(indices):
                    self.start(indices)
                case Cancel(indices):
                    assert indices and set(indices) <= self.running
                    self.running -= set(indices)
                case Score(indices):
                    assert self.to_score is None and len(indices) >= 2
                    assert set(indices) <= self.answered
                    self.to_score = indices
                case Serve(index):
                    assert index in self.answered and (index in self.servable or not self.servable)
                    self.answer()
                case Refuse():
                    self.answer()
                case BreakOff():
                    self.break_off()
                case Settle() | Abort():
                    assert not self.running, "no sibling is left running"
                    self.num_ends += 1
                    self.is_settled = isinstance(decision, Settle)
                    self.check_best()

    def check_best(self) -> None:
        """Check that a settled group with rewards has a best sibling."""
        rewards = {i: one for i, one in self.scheduler.rewards.items() if one is not None}
        if self.is_settled:
            best = self.scheduler.selection.best
            assert best is None or best in rewards
            assert best is None if not rewards else rewards[best or 0] == max(rewards.values())

    def start(self, indices: tuple[int, ...]) -> None:
        assert indices and not self.started & set(indices), "each sibling is started once"
        self.started |= set(indices)
        self.running |= set(indices)

    def answer(self) -> None:
        assert not (self.is_relaying or self.has_left)
        self.num_answers += 1
        self.is_sending = True

    def break_off(self) -> None:
        assert not self.has_left
        if not self.is_sending:  # an answer that has begun counts already
            self.num_answers += 1
        self.is_sending = self.is_relaying = False

    @precondition(lambda self: self.running)
    @rule(data=st.data(), came=st.sampled_from(list(SiblingOutcome)))
    def a_sibling_ends(self, data: st.DataObject, came: SiblingOutcome) -> None:
        self.ends(data.draw(st.sampled_from(sorted(self.running))), came)

    def ends(self, index: int, came: SiblingOutcome) -> None:
        self.running.remove(index)
        if came in (OK, HIDDEN):
            self.answered.add(index)
        if came is OK:
            self.servable.add(index)
        if index == 0 and self.is_relaying:
            self.is_relaying = False
            self.num_answers += not self.has_left
        self.execute(self.scheduler.sibling_finished(index, came))

    @precondition(lambda self: self.is_relaying)
    @rule()
    def the_lead_begins(self) -> None:
        self.execute(self.scheduler.lead_began())
        assert len(self.started) == self.num or self.num_ends

    @precondition(lambda self: self.to_score is not None)
    @rule(data=st.data())
    def rewards_arrive(self, data: st.DataObject) -> None:
        assert self.to_score is not None
        reward = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))
        rewards = {index: data.draw(reward) for index in self.to_score}
        self.to_score = None
        self.execute(self.scheduler.scoring_finished(rewards))

    @rule()
    def the_deadline_passes(self) -> None:
        self.execute(self.scheduler.deadline_passed())

    @precondition(lambda self: self.is_sending)
    @rule()
    def the_answer_ends(self) -> None:
        self.is_sending = False
        self.execute(self.scheduler.answer_sent())

    @rule()
    def the_app_leaves(self) -> None:
        if self.num_answers == 0 and self.num_ends == 0:
            self.has_left = self.is_cancelled_with_its_app
        self.execute(self.scheduler.app_disconnected())

    @precondition(lambda self: self.started)
    @rule(often=st.integers(0, 9))
    def the_proxy_stops(self, often: int) -> None:
        if often == 0:
            self.execute(self.scheduler.abort("proxy_stopped"))

    @rule(index=st.integers(0, 6), came=st.sampled_from(list(SiblingOutcome)))
    def a_sibling_that_is_not_running_ends(self, index: int, came: SiblingOutcome) -> None:
        if index not in self.running:
            assert self.scheduler.sibling_finished(index, came) == []

    @invariant()
    def one_answer_at_most(self) -> None:
        assert self.num_answers <= 1 and self.num_ends <= 1

    def teardown(self) -> None:
        """Let everything end that is running; the group must end with it."""
        if not hasattr(self, "scheduler"):
            return
        while self.num_ends == 0:
            if self.to_score is not None:
                indices, self.to_score = self.to_score, None
                self.execute(self.scheduler.scoring_finished(dict.fromkeys(indices, 1.0)))
            elif self.is_sending:
                self.the_answer_ends()
            else:
                assert self.running, "the group waits for something"
                self.ends(min(self.running), OK)
        assert self.num_answers == (0 if self.has_left else 1)
        assert self.scheduler.is_over and not self.running
        assert self.scheduler.app is AppState.ANSWERED or not self.is_settled
        assert (self.scheduler.app is AppState.LEFT) == self.has_left


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=300, stateful_step_count=25)
