"""The gains of learning and of choosing are estimated by session."""

from __future__ import annotations

import random

import pytest

from fakevllm.release import arm_gains
from fakevllm.release.arm_gains import SESSION_IDLE_S, ArmGains, GroupOutcome
from fakevllm.release.arms import Arm
from fakevllm.statistics.confidence_sequence import DifferenceSequence, RewardRange

UNIT = RewardRange(0.0, 1.0)
LATER = 1e9


def outcome(
    root: str, arm: Arm, mean: float, *, at: float = 0.0, served: float | None = None
) -> GroupOutcome:
    highest = mean if served is None else max(mean, served)
    return GroupOutcome(root, arm, at, mean, served, mean, highest)


def test_a_session_is_one_observation_whatever_the_number_of_its_groups() -> None:
    gains = ArmGains(UNIT)
    for mean in (0.0, 1.0, 0.5):
        gains.add(outcome("long", Arm.TRAINING, mean, served=1.0))
    gains.add(outcome("short", Arm.BASELINE, 0.25))
    summary = gains.summary(LATER)
    assert summary.sessions == {Arm.TRAINING: 1, Arm.BASELINE: 1}
    assert summary.means == {Arm.TRAINING: 0.5, Arm.BASELINE: 0.25}
    assert summary.policy is not None and summary.choice is not None
    assert (summary.policy.mean, summary.policy.num) == (0.25, 1)
    assert (summary.choice.mean, summary.choice.num) == (0.5, 1)


def test_a_session_is_counted_when_it_was_idle_and_its_later_groups_do_not_count() -> None:
    gains = ArmGains(UNIT)
    gains.add(outcome("a", Arm.BASELINE, 0.5, at=0.0))
    gains.add(outcome("a", Arm.BASELINE, 1.0, at=SESSION_IDLE_S - 1))
    summary = gains.summary(2 * SESSION_IDLE_S - 2)
    assert (summary.sessions, summary.num_open) == ({}, 1)
    summary = gains.summary(2 * SESSION_IDLE_S - 1)
    assert (summary.sessions, summary.num_open) == ({Arm.BASELINE: 1}, 0)
    gains.add(outcome("a", Arm.BASELINE, 0.0, at=3 * SESSION_IDLE_S))
    assert gains.summary(LATER).means == {Arm.BASELINE: 0.75}


def test_a_session_of_the_rarer_arm_is_paired_with_the_others_since_the_last_pair() -> None:
    gains = ArmGains(UNIT)
    expected = DifferenceSequence(UNIT)
    rewards = {"t0": 0.25, "t1": 0.75, "b0": 0.125, "t2": 1.0, "b1": 0.5, "b2": 0.0, "t3": 0.5}
    for at, (root, mean) in enumerate(rewards.items()):
        arm = Arm.TRAINING if root.startswith("t") else Arm.BASELINE
        gains.add(outcome(root, arm, mean, at=at))
    expected.add([0.125], [0.25, 0.75])
    expected.add([0.5], [1.0])
    expected.add([0.0], [0.5])
    policy, interval = gains.summary(LATER).policy, expected.interval()
    assert policy is not None and interval is not None
    assert (policy.num, policy.mean) == (3, interval.mean)
    assert (policy.low, policy.high) == (max(-1.0, interval.low), min(1.0, interval.high))


def test_the_intervals_contain_the_true_gains() -> None:
    rng = random.Random(3)
    gains = ArmGains(UNIT)
    for number in range(20_000):
        arm = Arm.BASELINE if rng.random() < 0.1 else Arm.TRAINING
        rate = 0.3 if arm is Arm.BASELINE else 0.6
        siblings = [float(rng.random() < rate) for _ in range(4)]
        mean = sum(siblings) / 4
        gains.add(GroupOutcome(str(number), arm, number, mean, max(siblings), 0.0, 1.0))
    summary = gains.summary(LATER)
    policy, choice = summary.policy, summary.choice
    assert policy is not None and policy.low is not None and policy.high is not None
    assert policy.low < 0.3 < policy.high and policy.low > 0.2
    assert choice is not None and choice.low is not None and choice.high is not None
    assert choice.low < (1 - 0.4**4) - 0.6 < choice.high and choice.low > 0.3


@pytest.mark.parametrize("reward", [-0.5, 1.5])
def test_a_reward_outside_of_the_range_is_reported_and_no_interval_is_shown(reward: float) -> None:
    gains = ArmGains(UNIT)
    gains.add(outcome("t", Arm.TRAINING, 0.5, served=0.5))
    gains.add(outcome("b", Arm.BASELINE, reward))
    summary = gains.summary(LATER)
    assert summary.outside == reward
    for gain in (summary.policy, summary.choice):
        assert gain is not None and (gain.low, gain.high) == (None, None)


def test_nothing_is_known_without_sessions_of_both_arms() -> None:
    gains = ArmGains(UNIT)
    assert gains.summary(LATER).policy is None and gains.summary(LATER).choice is None
    gains.add(outcome("t", Arm.TRAINING, 0.5))
    gains.add(outcome("r", Arm.RELEASED, 0.5))
    summary = gains.summary(LATER)
    assert summary.policy is None and summary.choice is None
    assert summary.sessions == {Arm.TRAINING: 1, Arm.RELEASED: 1}


def test_a_session_whose_arm_changed_keeps_what_its_first_arm_got() -> None:
    gains = ArmGains(UNIT)
    gains.add(outcome("a", Arm.BASELINE, 0.5))
    gains.add(outcome("a", Arm.TRAINING, 1.0))
    assert gains.summary(LATER).means == {Arm.BASELINE: 0.5}


def test_the_memory_of_open_and_counted_sessions_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MAX_OPEN_SESSIONS", "MAX_COUNTED_SESSIONS", "MAX_UNPAIRED"):
        monkeypatch.setattr(arm_gains, name, 4)
    gains = ArmGains(UNIT)
    for number in range(20):
        gains.add(outcome(str(number), Arm.TRAINING, 0.5))
    assert gains.summary(0.0).num_open == 4
    assert gains.summary(0.0).sessions == {Arm.TRAINING: 16}
    gains.add(outcome("b", Arm.BASELINE, 0.5))
    policy = gains.summary(LATER).policy
    assert policy is not None and policy.num == 1
