"""If the engine holds one set of weights, training waits while the served version is evaluated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fakevllm.release.actions import (
    Action,
    Decide,
    Evaluate,
    LimitTraining,
    SampleReference,
    Wait,
)
from fakevllm.release.between_steps import ROWS_AT_ONCE, BetweenStepsController
from fakevllm.release.controller import GateRules, ScoredPair
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.releases import Decision, ReleaseRecord
from tests.proxy.release.simulated_run import SimulatedServer

RULES = GateRules(RewardRange(0, 1), num_samples=4, evaluate_every=10, max_samples=80)
NUM_DRAWS = 20
GOOD = [1.0] * 4


@dataclass
class Rig:
    """A gate, a simulated server, and the answers of the references. A reference has the released
    version's answers to the held-out rows."""

    rules: GateRules = RULES
    means: list[float] = field(default_factory=lambda: [0.5])
    """True mean reward of each version."""
    rewards: Callable[[float], list[float]] = lambda mean: [mean] * 4
    """Function from the mean reward of a version to the rewards of this version's answers to one
    row."""

    def __post_init__(self) -> None:
        self.server = SimulatedServer(self.means)
        self.references: dict[str, list[list[float]]] = {}
        """The rewards of each reference's answers, as the ledger stores them, by the name of the
        reference."""
        self.restart()

    def restart(self) -> None:
        """Start the proxy again."""
        self.gate = BetweenStepsController(self.rules)
        self.read()

    def read(self) -> None:
        """Read the server's history, and the answers of the reference."""
        self.gate.history_read(self.server.history())
        self.gate.version_published(self.server.newest)
        if self.gate.needs_reference:
            assert self.gate.reference is not None
            answers = self.references.setdefault(self.gate.reference, [])
            self.gate.reference_answered(self.gate.reference, len(answers))

    def train(self, mean: float | None = None, most: int = 1000) -> int:
        """Train until the limit is reached, but at most `most` steps. Return the number of
        steps."""
        num = 0
        limit = self.server.training_limit
        while num < most and (limit is None or self.server.newest < limit):
            self.server.means.append(self.server.means[-1] if mean is None else mean)
            num += 1
        self.read()
        return num

    @property
    def next(self) -> Action:
        return self.gate.next_action()

    def act(self) -> Action:
        """Carry out the next action of the gate, and return the action."""
        action = self.next
        match action:
            case Decide():
                assert not self.server.decide(action.id, action.decision, action.version)
            case LimitTraining(version=version):
                self.server.training_limit = version
            case SampleReference():
                answers = self.references[action.reference]
                assert len(answers) == action.draw
                mean = self.server.means[-1]
                answers += [self.rewards(mean) for _ in range(action.num_draws)]
                self.gate.reference_answered(action.reference, len(answers))
            case Evaluate():
                assert self.gate.reference is not None
                answers = self.references[self.gate.reference]
                for draw in range(action.draw, action.draw + action.num_draws):
                    pair = ScoredPair(answers[draw], self.rewards(self.server.means[-1]))
                    self.gate.pair_scored(action.candidate, action.released, draw, pair)
            case Wait():
                return action
        self.read()
        return action

    def act_until_waiting(self) -> list[Action]:
        """Carry out actions until the gate waits. Return the actions."""
        done: list[Action] = []
        while not isinstance(self.next, Wait):
            done.append(self.act())
        return done

    @property
    def decisions(self) -> list[tuple[Decision, int | None]]:
        return [(record.decision, record.version) for record in self.server.records]


def with_reference(rules: GateRules = RULES) -> Rig:
    rig = Rig(rules)
    rig.act_until_waiting()
    return rig


def with_candidate(mean: float) -> Rig:
    rig = with_reference()
    rig.train(mean)
    assert rig.act() == Decide("gate-candidate-0", Decision.CANDIDATE, None)
    return rig


def test_the_first_version_answers_the_rows_before_training_begins() -> None:
    rig = Rig()
    assert rig.act() == LimitTraining(0)
    assert rig.train() == 0
    sampled = [action for action in rig.act_until_waiting() if isinstance(action, SampleReference)]
    assert [action.draw for action in sampled] == [0, 8, 16]
    assert sum(action.num_draws for action in sampled) == NUM_DRAWS
    assert rig.train() == RULES.evaluate_every


def test_training_waits_for_the_verdict_and_goes_on_after_the_next_reference() -> None:
    rig = with_candidate(mean=1.0)
    assert rig.server.candidate == 10
    assert rig.next == Evaluate(candidate=10, released=0, draw=0, num_draws=ROWS_AT_ONCE)
    assert rig.train() == 0
    done = rig.act_until_waiting()
    assert rig.decisions[-1] == (Decision.RELEASED, 10)
    kinds = [type(action) for action in done]
    assert kinds.index(SampleReference) > kinds.index(Decide)
    assert done[-1] == LimitTraining(20)
    assert rig.train() == 10


def test_a_rejected_version_is_left_and_the_restored_one_makes_a_new_reference() -> None:
    rig = with_candidate(mean=0.0)
    rig.act_until_waiting()
    assert rig.decisions[-1] == (Decision.REJECTED, 10)
    assert rig.server.newest == 11
    assert list(rig.references) == ["0-0-4samples", "0-2-4samples"]
    assert rig.server.training_limit == 21


def test_restored_weights_are_no_candidate_also_if_each_version_is_one() -> None:
    rig = Rig(replace(RULES, evaluate_every=1))
    rig.act_until_waiting()
    assert rig.train(0.0) == 1
    rig.act_until_waiting()
    assert rig.decisions == [(Decision.CANDIDATE, 1), (Decision.REJECTED, 1)]
    assert (rig.server.newest, rig.next) == (2, Wait())
    assert rig.train() == 1
    assert isinstance(rig.next, Decide)


def test_after_an_undecided_version_training_goes_on_with_the_same_reference() -> None:
    rig = with_candidate(mean=0.45)
    rig.act_until_waiting()
    assert rig.decisions[-1] == (Decision.UNDECIDED, 10)
    assert list(rig.references) == ["0-0-4samples"]
    assert (rig.server.released, rig.train()) == (0, 10)


def test_a_restarted_proxy_continues_where_the_last_one_ended() -> None:
    rig = Rig()
    while rig.act() != SampleReference("0-0-4samples", 8, 8):
        pass
    rig.restart()
    assert rig.next == SampleReference("0-0-4samples", 16, 4)
    rig.act_until_waiting()
    rig.train(1.0, most=4)
    rig.restart()
    assert rig.next == Wait()
    assert rig.train(1.0) == 6
    rig.act()
    rig.restart()
    assert rig.next == Evaluate(10, 0, 0, ROWS_AT_ONCE)


def test_copies_of_a_version_after_a_crash_are_that_version() -> None:
    rig = Rig()
    rig.act()
    rig.act()
    rig.server.means.append(rig.server.means[0])
    rig.server.originals[1] = 0
    rig.read()
    assert rig.next == SampleReference("0-0-4samples", 8, 8)
    rig.act_until_waiting()
    rig.train(1.0)
    rig.act()
    assert rig.server.candidate == 11
    rig.server.means.append(rig.server.means[11])
    rig.server.originals[12] = 11
    rig.read()
    assert rig.next == Evaluate(11, 0, 0, ROWS_AT_ONCE)
    rig.act_until_waiting()
    assert rig.decisions[-1] == (Decision.RELEASED, 11)


def test_a_candidate_is_undecided_if_training_went_on_meanwhile() -> None:
    rig = with_candidate(mean=1.0)
    rig.server.training_limit = None
    rig.train(most=1)
    action = rig.next
    assert isinstance(action, Decide)
    assert (action.decision, action.version) == (Decision.UNDECIDED, 10)
    assert "training went on" in action.evidence["trouble"]


def test_a_gate_in_the_middle_of_a_run_lets_training_wait_for_an_operator() -> None:
    rig = Rig(means=[0.5] * 6)
    assert rig.act() == LimitTraining(5)
    assert rig.act() == Wait()
    assert "fakevllm release promote 5" in (rig.gate.trouble or "")
    assert "fakevllm release rollback" in (rig.gate.trouble or "")
    rig.server.decide("operator-1", Decision.RELEASED, 5, by="anna")
    rig.read()
    assert rig.gate.trouble is None
    rig.act_until_waiting()
    assert list(rig.references) == ["0-0-4samples", "5-1-4samples"]
    assert rig.train() == 10


def test_an_older_version_that_an_operator_releases_is_no_reference() -> None:
    rig = with_reference()
    rig.train(1.0)
    rig.act_until_waiting()
    rig.train(1.0, most=3)
    rig.server.decide("operator-1", Decision.RELEASED, 12, by="anna")
    rig.read()
    assert rig.server.training_limit == 13
    assert "released version 12 has answered only 0 of 20" in (rig.gate.trouble or "")
    assert rig.train() == 0


def test_a_version_that_is_released_again_answers_the_rows_again() -> None:
    rig = with_candidate(mean=1.0)
    rig.act_until_waiting()
    assert rig.server.released == 10
    rig.train(1.0)
    rig.server.decide("operator-1", Decision.RELEASED, 0, by="anna")
    rig.read()
    assert rig.next == Wait()
    assert "has answered only 0 of 20 held-out rows" in (rig.gate.trouble or "")


def test_after_a_rollback_to_another_version_than_the_released_one_an_operator_is_asked() -> None:
    rig = with_reference()
    rig.train(most=6)
    server = rig.server
    server.rejected |= {4, 5, 6}  # `fakevllm release rollback 3`
    server.means.append(server.means[3])
    server.originals[7] = 3
    server.training_limit = 6
    server.records.append(rejected_by_an_operator(version=4, restored=3))
    rig.read()
    assert rig.next == Wait()
    assert "fakevllm release promote 7" in (rig.gate.trouble or "")


def test_a_copy_of_an_undecided_version_is_not_evaluated_again() -> None:
    rig = Rig(replace(RULES, evaluate_every=1))
    rig.act_until_waiting()
    rig.train(0.45)
    rig.act_until_waiting()
    assert rig.decisions == [(Decision.CANDIDATE, 1), (Decision.UNDECIDED, 1)]
    rig.server.means.append(rig.server.means[1])  # the server was killed and started again
    rig.server.originals[2] = 1
    rig.read()
    assert rig.act() == LimitTraining(3)
    assert rig.next == Wait()
    assert rig.train() == 1


def test_another_number_of_samples_needs_another_reference() -> None:
    rig = with_reference()
    rig.train(0.6)
    rig.act()
    rig.rules = replace(RULES, num_samples=8, max_samples=160)
    rig.restart()
    assert isinstance(rig.next, Wait)
    assert "has answered only 0 of 20 held-out rows" in (rig.gate.trouble or "")


def test_a_row_without_rewards_in_the_reference_counts_for_no_version() -> None:
    rig = with_candidate(mean=0.5)
    for draw in range(NUM_DRAWS):
        rig.gate.pair_scored(10, 0, draw, ScoredPair([], GOOD if draw % 2 else []))
    action = rig.next
    assert isinstance(action, Decide)
    assert (action.decision, action.evidence["pairs"]) == (Decision.UNDECIDED, 0)


def test_a_limit_that_somebody_removed_during_an_evaluation_is_set_again() -> None:
    rig = with_candidate(mean=0.6)
    rig.server.training_limit = None
    rig.read()
    assert rig.act() == LimitTraining(10)
    assert isinstance(rig.next, Evaluate)


def test_while_releases_are_held_training_waits_at_the_next_evaluation() -> None:
    rig = with_reference()
    rig.server.decide("operator-1", Decision.HOLD, None, by="anna")
    rig.read()
    assert rig.train() == 10
    assert rig.next == Wait()
    rig.server.decide("operator-2", Decision.RESUME, None, by="anna")
    rig.read()
    assert isinstance(rig.next, Decide)


def test_with_other_hooks_the_rows_must_be_answered_again() -> None:
    rig = with_reference()
    rig.gate.scorer_changed("other hooks")
    assert rig.gate.needs_reference
    rig.references.clear()
    rig.read()
    assert rig.next == LimitTraining(0)  # and not 10
    rig.act_until_waiting()
    assert len(rig.references["0-0-4samples"]) == NUM_DRAWS


def test_rows_that_measure_nothing_let_training_wait() -> None:
    rig = Rig()
    rig.gate.rows_unusable("the rows were trained")
    assert rig.act() == LimitTraining(0)
    assert rig.act() == Wait()
    assert rig.gate.trouble == "the rows were trained"


def test_a_server_that_does_not_limit_training_is_named() -> None:
    rig = Rig()
    rig.gate.history_read(
        rig.server.history().model_copy(update={"released_copies": [], "newest_copies": []})
    )
    rig.gate.reference_answered(rig.gate.reference or "", 0)
    assert rig.next == Wait()
    assert "update fakevllm-server" in (rig.gate.trouble or "")


def rejected_by_an_operator(version: int, restored: int) -> ReleaseRecord:
    return ReleaseRecord(
        number=1,
        id="rollback",
        decision=Decision.REJECTED,
        version=version,
        parent=None,
        time_s=1.0,
        decided_by="anna",
        evidence={"restored": restored},
    )


def random_rewards(source: random.Random) -> Callable[[float], list[float]]:
    return lambda mean: [float(source.random() < mean) for _ in range(4)]


def test_of_200_harmless_versions_at_most_five_percent_are_rejected() -> None:
    decisions = [evaluated(seed, before=0.6, after=0.6) for seed in range(200)]
    assert decisions.count(Decision.REJECTED) <= 10
    assert decisions.count(Decision.RELEASED) >= 100


def test_versions_that_lost_far_more_than_the_margin_are_rejected() -> None:
    decisions = [evaluated(seed, before=0.6, after=0.2) for seed in range(50)]
    assert decisions == [Decision.REJECTED] * 50


def evaluated(seed: int, before: float, after: float) -> Decision:
    """Return the decision about the first candidate. The true mean reward of the candidate is
    `after`."""
    rules = replace(RULES, max_samples=1200, margin=0.1)
    rig = Rig(rules, [before], random_rewards(random.Random(seed)))
    rig.act_until_waiting()
    rig.train(after)
    rig.act_until_waiting()
    return rig.decisions[1][0]
