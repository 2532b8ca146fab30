"""The gate's decisions follow from the history, the scored pairs and the scored sessions."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.release.actions import (
    Action,
    Decide,
    Evaluate,
    Wait,
)
from fakevllm.release.controller import (
    GateController,
    GateRules,
    ScoredPair,
    ScoredSession,
    _LiveTest,  # pyright: ignore[reportPrivateUsage]
)
from fakevllm.release.held_out_draws import HeldOutDraws
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.releases import Decision
from tests.proxy.release.simulated_run import RULES, SimulatedRun, SimulatedServer

BETTER = ScoredPair([0.0, 0.0], [1.0, 1.0])
WORSE = ScoredPair([1.0, 1.0], [0.0, 0.0])
UNSCORED = ScoredPair([], [])


class Gate:
    """A gate with a simulated server that has published some versions."""

    def __init__(self, num_versions: int = 20, rules: GateRules = RULES) -> None:
        self.server = SimulatedServer([0.5] * (num_versions + 1))
        self.controller = GateController(rules)
        self.read()

    def read(self) -> None:
        self.controller.version_published(self.server.newest)
        self.controller.history_read(self.server.history())

    def operator(self, decision: Decision, version: int | None = None) -> None:
        number = len(self.server.records)
        self.server.decide(f"operator-{number}", decision, version, by="anna")
        self.read()

    def send(self) -> Decide:
        """Send the decision that is due to the server, and read its history."""
        action = self.controller.next_action()
        assert isinstance(action, Decide)
        is_refused = self.server.decide(action.id, action.decision, action.version)
        self.read()
        if is_refused:
            self.controller.decision_refused(action)
        return action

    def score(self, pair: ScoredPair, most: int = 10_000) -> int:
        """Add pairs until there is a verdict, but at most `most` pairs. Return the number of
        pairs."""
        for num in range(most):
            action = self.controller.next_action()
            if not isinstance(action, Evaluate):
                return num
            self.controller.pair_scored(action.candidate, action.released, action.draw, pair)
        return most

    @property
    def next(self) -> Action:
        return self.controller.next_action()


def evaluating(num_versions: int = 20, rules: GateRules = RULES) -> Gate:
    gate = Gate(num_versions, rules)
    assert gate.send().decision is Decision.CANDIDATE
    return gate


def test_nothing_is_due_before_the_history_is_known() -> None:
    controller = GateController(RULES)
    controller.version_published(100)
    assert controller.next_action() == Wait()


def test_the_newest_version_becomes_a_candidate_after_evaluate_every_versions() -> None:
    gate = Gate(num_versions=19)
    assert gate.next == Wait()
    gate.server.means.append(0.5)
    gate.read()
    assert gate.next == Decide("gate-candidate-0", Decision.CANDIDATE, None)
    gate.send()
    assert gate.next == Evaluate(candidate=20, released=0, draw=0)


def test_the_next_candidate_is_known_unless_one_is_evaluated_or_releases_are_on_hold() -> None:
    gate = Gate(num_versions=0)
    assert gate.controller.next_candidate == RULES.evaluate_every
    gate.operator(Decision.HOLD)
    assert gate.controller.next_candidate is None
    gate.operator(Decision.RESUME)
    assert gate.controller.next_candidate == RULES.evaluate_every
    evaluated = Gate()
    evaluated.send()
    assert evaluated.controller.next_candidate is None


def test_a_better_candidate_is_released_with_its_evidence() -> None:
    gate = evaluating()
    num_pairs = gate.score(BETTER)
    action = gate.send()
    assert (action.decision, action.version) == (Decision.RELEASED, 20)
    assert action.evidence["pairs"] == num_pairs < 20
    assert action.evidence["low"] > -RULES.margin
    assert action.evidence["released"] == 0
    assert gate.server.released == 20
    assert gate.next == Wait()


def test_a_worse_candidate_is_rejected() -> None:
    gate = evaluating()
    gate.score(WORSE)
    action = gate.send()
    assert (action.decision, action.version) == (Decision.REJECTED, 20)
    assert action.evidence["high"] < -RULES.margin
    assert gate.server.released == 0


def test_a_candidate_without_a_verdict_is_undecided_after_max_samples() -> None:
    rules = GateRules(RewardRange(0, 1), num_samples=4, max_samples=40)
    gate = evaluating(rules=rules)
    at_the_margin = ScoredPair([0.525], [0.475])
    assert gate.score(at_the_margin) == 10
    assert gate.send().decision is Decision.UNDECIDED
    assert gate.server.released == 0
    assert gate.next == Wait()


def test_rows_without_a_reward_count_as_draws_but_not_as_pairs() -> None:
    rules = GateRules(RewardRange(0, 1), num_samples=4, max_samples=40)
    gate = evaluating(rules=rules)
    assert gate.score(UNSCORED) == 10
    action = gate.send()
    assert action.decision is Decision.UNDECIDED
    assert (action.evidence["pairs"], action.evidence["draws"]) == (0, 10)
    assert action.evidence["difference"] is None


def test_a_candidate_that_gets_no_reward_where_it_would_lose_is_rejected() -> None:
    gate = evaluating()
    same, lost = ScoredPair([0.9] * 4, [0.9] * 4), ScoredPair([0.9] * 4, [])
    while isinstance(action := gate.next, Evaluate):
        pair = same if action.draw % 5 < 2 else lost
        gate.controller.pair_scored(20, 0, action.draw, pair)
    assert gate.send().decision is Decision.REJECTED


def test_a_reward_that_only_one_version_lacks_counts_against_the_candidate() -> None:
    lacks_some, lacks_all = ScoredPair([0.6] * 4, [0.6] * 2), ScoredPair([], [0.4, 0.4])
    for pair, difference in ((lacks_some, -0.3), (lacks_all, -0.6)):
        gate = evaluating()
        gate.controller.pair_scored(20, 0, 0, pair)
        assert gate.controller.progress["difference"] == pytest.approx(difference)


def test_no_version_is_released_after_a_reward_outside_of_the_range() -> None:
    gate = evaluating()
    gate.score(ScoredPair([9.0] * 4, [2.0] * 4))
    assert gate.next == Wait()
    trouble = gate.controller.trouble
    assert trouble is not None
    assert "reward 9, outside of release.reward_range, from 0 to 1" in trouble


def test_a_live_reward_outside_of_the_range_stops_releases_but_no_rejection() -> None:
    gate = Gate()
    gate.controller.rewards_seen(0.5, 1.5)
    assert gate.next == Wait()
    gate = evaluating()
    gate.score(BETTER)
    gate.controller.rewards_seen(-0.1)
    assert gate.next == Wait()
    live(gate, training=0.2, released=0.9, num=60)
    assert gate.send().decision is Decision.REJECTED


def test_another_hook_begins_the_evaluation_again() -> None:
    gate = evaluating()
    gate.controller.scorer_changed("one")
    gate.score(BETTER, most=3)
    gate.controller.scorer_changed("one")
    assert gate.next == Evaluate(20, 0, draw=3)
    gate.controller.scorer_changed("other")
    assert gate.next == Evaluate(20, 0, draw=0)
    assert gate.controller.progress["pairs"] == 0


def test_another_hook_begins_the_comparison_of_live_sessions_again() -> None:
    gate = evaluating()
    gate.controller.scorer_changed("one")
    live(gate, training=0.2, released=0.9, num=60)
    assert isinstance(gate.next, Decide)
    gate.controller.scorer_changed("other")
    assert gate.next == Evaluate(20, 0, draw=0)


def test_a_reward_outside_of_the_range_does_not_count_against_another_hook() -> None:
    gate = evaluating()
    gate.controller.scorer_changed("one")
    gate.controller.rewards_seen(7.0)
    gate.controller.scorer_changed("one")
    assert gate.next == Wait()
    gate.controller.scorer_changed("other")
    assert gate.controller.trouble is None and gate.next == Evaluate(20, 0, draw=0)


def test_a_candidate_that_cannot_be_sampled_becomes_undecided_with_the_reason() -> None:
    gate = evaluating()
    gate.score(BETTER, most=3)
    gate.controller.give_up(19, "another version")
    assert isinstance(gate.next, Evaluate)
    gate.controller.give_up(20, "the checkpoint is damaged")
    action = gate.send()
    assert action.decision is Decision.UNDECIDED
    assert action.evidence["trouble"] == "the checkpoint is damaged"
    assert gate.next == Wait()


def test_the_id_of_the_request_for_a_candidate_stays_the_same_after_a_training_step() -> None:
    gate = Gate()
    before = gate.next
    gate.server.means.append(0.5)
    gate.read()
    assert gate.next == before


def test_a_margin_of_the_whole_range_decides_nothing() -> None:
    rules = GateRules(RewardRange(0, 1), max_samples=40, margin=1.0)
    gate = evaluating(rules=rules)
    gate.score(WORSE)
    assert gate.send().decision is Decision.UNDECIDED


def test_the_next_candidate_comes_evaluate_every_versions_after_the_latest_verdict() -> None:
    gate = evaluating()
    gate.score(WORSE)
    gate.send()
    restored = gate.server.newest
    assert restored == 21
    gate.server.means += [0.5] * (RULES.evaluate_every - 2)
    gate.read()
    assert gate.next == Wait()
    gate.server.means.append(0.5)
    gate.read()
    assert isinstance(gate.next, Decide)


def test_during_a_hold_no_version_becomes_a_candidate() -> None:
    gate = Gate()
    gate.operator(Decision.HOLD)
    assert gate.next == Wait()
    gate.operator(Decision.RESUME)
    assert gate.send().decision is Decision.CANDIDATE


def test_during_a_hold_a_good_candidate_waits_for_its_release() -> None:
    gate = evaluating()
    gate.operator(Decision.HOLD)
    gate.score(BETTER)
    assert gate.next == Wait()
    gate.operator(Decision.RESUME)
    assert gate.send().decision is Decision.RELEASED


def test_during_a_hold_a_bad_candidate_is_rejected() -> None:
    gate = evaluating()
    gate.operator(Decision.HOLD)
    gate.score(WORSE)
    assert gate.send().decision is Decision.REJECTED


def test_a_release_by_an_operator_starts_the_evaluation_of_the_candidate_again() -> None:
    gate = evaluating()
    gate.score(BETTER, most=3)
    gate.operator(Decision.RELEASED, 10)
    assert gate.next == Evaluate(candidate=20, released=10, draw=0)


def test_a_rejection_by_an_operator_ends_the_evaluation() -> None:
    gate = evaluating()
    gate.score(BETTER, most=3)
    gate.operator(Decision.REJECTED, 15)
    assert gate.next == Wait()


def test_pairs_of_another_evaluation_and_repeated_draws_are_ignored() -> None:
    gate = evaluating()
    for candidate, released, draw in ((19, 0, 0), (20, 1, 0), (20, 0, 1)):
        gate.controller.pair_scored(candidate, released, draw, WORSE)
    assert gate.next == Evaluate(20, 0, draw=0)
    for _ in range(2):
        gate.controller.pair_scored(20, 0, 0, WORSE)
    assert gate.next == Evaluate(20, 0, draw=1)


def live(gate: Gate, training: float, released: float, num: int, version: int = 5) -> None:
    for _ in range(num):
        gate.controller.session_scored(ScoredSession(None, released))
        gate.controller.session_scored(ScoredSession(version, training))


def test_live_sessions_reject_the_training_arm_between_evaluations() -> None:
    gate = Gate(num_versions=10)
    live(gate, training=0.2, released=0.9, num=30, version=4)
    live(gate, training=0.2, released=0.9, num=30, version=9)
    action = gate.send()
    assert (action.decision, action.version) == (Decision.REJECTED, 4)
    assert action.evidence["source"] == "live"
    assert gate.server.rejected == set(range(4, 11))
    assert gate.next == Wait()


def test_live_sessions_reject_the_first_version_after_a_candidate_that_is_acceptable() -> None:
    gate = Gate(num_versions=20)
    live(gate, training=0.6, released=0.6, num=100, version=7)
    gate.send()
    live(gate, training=0.6, released=0.6, num=100, version=20)
    gate.server.means += [0.1] * 10
    gate.read()
    live(gate, training=0.1, released=0.6, num=300, version=23)
    action = gate.send()
    assert (action.decision, action.version) == (Decision.REJECTED, 23)
    assert 20 not in gate.server.rejected


def test_live_sessions_reject_the_oldest_version_if_versions_up_to_the_candidate_are_worse() -> (
    None
):
    gate = Gate(num_versions=20)
    live(gate, training=0.4, released=0.6, num=10, version=7)
    gate.send()
    live(gate, training=0.1, released=0.6, num=100, version=23)
    assert gate.send().version == 7


def test_live_sessions_reject_what_was_trained_from_the_restored_version() -> None:
    gate = Gate(num_versions=10)
    live(gate, training=0.2, released=0.9, num=30, version=4)
    assert gate.send().version == 4
    restored = gate.server.newest
    gate.server.means += [0.5] * 2
    gate.read()
    live(gate, training=0.2, released=0.9, num=30, version=restored)
    assert gate.send().version == restored
    assert [record.version for record in gate.server.records] == [4, restored + 1]
    assert restored not in gate.server.rejected
    assert gate.next == Wait()


def test_a_refused_rejection_begins_the_comparison_of_live_sessions_again() -> None:
    gate = Gate(num_versions=10)
    live(gate, training=0.2, released=0.9, num=30, version=4)
    gate.send()
    restored = gate.server.newest
    live(gate, training=0.2, released=0.9, num=30, version=restored)
    gate.send()
    assert len(gate.server.records) == 1 and gate.next == Wait()
    gate.server.means += [0.5] * RULES.evaluate_every
    gate.read()
    assert gate.send().decision is Decision.CANDIDATE
    live(gate, training=0.2, released=0.9, num=30, version=restored + 1)
    assert gate.send().decision is Decision.REJECTED


def test_the_cost_of_a_live_session_does_not_grow() -> None:
    test = _LiveTest(RULES)
    random_ = random.Random(1)
    parts: list[int] = []
    for _ in range(3):
        for _ in range(3000):
            test.add(ScoredSession(None, random_.random()))
        for _ in range(3000):
            test.add(ScoredSession(None, random_.random()))
            test.add(ScoredSession(5, random_.random()))
        parts.append(len(pickle.dumps(test)))
    assert max(parts) - min(parts) < 200


def test_live_sessions_never_release_a_version() -> None:
    gate = Gate(num_versions=10)
    live(gate, training=1.0, released=0.0, num=500)
    assert gate.next == Wait()


def test_sessions_of_versions_before_the_latest_verdict_do_not_count() -> None:
    gate = evaluating()
    gate.score(BETTER)
    gate.send()
    live(gate, training=0.0, released=1.0, num=100, version=20)
    assert gate.next == Wait()
    live(gate, training=0.0, released=1.0, num=100, version=21)
    assert isinstance(gate.next, Decide)


def test_each_verdict_starts_the_comparison_of_live_sessions_again() -> None:
    gate = Gate(num_versions=10)
    live(gate, training=0.4, released=0.9, num=10)
    gate.operator(Decision.RELEASED, 1)
    live(gate, training=0.9, released=0.9, num=1)
    assert gate.next == Wait()


@given(st.lists(st.sampled_from([BETTER, WORSE, UNSCORED]), max_size=60), st.booleans())
def test_a_controller_that_is_created_again_continues_where_the_last_one_ended(
    pairs: Sequence[ScoredPair], is_held: bool
) -> None:
    gate = evaluating()
    if is_held:
        gate.operator(Decision.HOLD)
    sent: list[ScoredPair] = []
    for pair in pairs:
        if isinstance(action := gate.next, Evaluate):
            gate.controller.pair_scored(action.candidate, action.released, action.draw, pair)
            sent.append(pair)
    again = GateController(RULES)
    again.version_published(gate.server.newest)
    again.history_read(gate.server.history())
    for draw, pair in enumerate(sent):
        again.pair_scored(20, 0, draw, pair)
    assert again.next_action() == gate.next


@given(st.integers(0, 10_000), st.floats(0.3, 0.7), st.integers(50, 400))
def test_a_rejected_version_is_never_released_nor_a_candidate_again(
    seed: int, mean: float, num_sessions: int
) -> None:
    rules = GateRules(RewardRange(0, 1), evaluate_every=1, max_samples=80, margin=0.02)
    run = SimulatedRun(seed, mean, lambda mean: max(0.2, mean - 0.02), rules)
    for _ in range(num_sessions):
        run.session()
        assert run.server.released not in run.server.rejected
        assert run.server.candidate not in run.server.rejected
        ids = [record.id for record in run.server.records]
        assert len(set(ids)) == len(ids)


@given(st.text(min_size=1, max_size=20), st.integers(1, 50))
def test_each_draw_is_a_row_and_counts_the_earlier_draws_of_the_same_row(
    eval_id: str, num_rows: int
) -> None:
    draws = HeldOutDraws(eval_id, num_rows)
    earlier: list[int] = []
    for number in range(40):
        draw = draws.get(number)
        assert 0 <= draw.row < num_rows
        assert draw.occurrence == earlier.count(draw.row)
        earlier.append(draw.row)
    assert HeldOutDraws(eval_id, num_rows).get(39) == draws.get(39)


def test_draws_take_each_row_about_equally_often() -> None:
    draws = HeldOutDraws("gate-20", 4)
    rows = [draws.get(number).row for number in range(4000)]
    assert all(900 < rows.count(row) < 1100 for row in range(4))
