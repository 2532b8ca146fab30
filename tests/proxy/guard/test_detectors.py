"""Each detector fires on a made-up run with its trouble, and stays quiet on an honest one."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakevllm.config.guard import GuardSection, GuardThresholds
from fakevllm.guard.detector_bank import DetectorBank, HeldOutMean
from fakevllm.guard.detectors import DETECTORS
from tests.proxy.guard.made_up_series import (
    NUM_STEPS,
    ONSET,
    RULES,
    THRESHOLDS,
    TROUBLES,
    Figures,
    healthy,
    run,
    with_trouble,
)


@pytest.mark.parametrize("detector", TROUBLES)
def test_a_detector_fires_once_soon_after_the_onset_of_its_trouble(detector: str) -> None:
    for seed in range(10):
        alarms = run(with_trouble(detector), seed)
        assert [alarm.detector for alarm in alarms] == [detector]
        (alarm,) = alarms
        assert ONSET <= alarm.step < ONSET + 2 * RULES.window_steps
        assert alarm.version == alarm.step + 1
        assert alarm.message.startswith(f"{detector}: ")
        assert f"(threshold {THRESHOLDS[detector]:g})" in alarm.message
        assert alarm.remedy.endswith(".")


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_no_detector_fires_in_an_honest_run(seed: int) -> None:
    assert run(healthy, seed) == []


@pytest.mark.parametrize(("share", "num_answers"), [(0.2, 1), (0.2, 8), (0.5, 1), (0.5, 4)])
def test_shares_of_few_answers_hardly_ever_raise_an_alarm_by_chance(
    share: float, num_answers: int
) -> None:
    def figures(step: int, noise: random.Random) -> Figures:
        def sample() -> float:
            return sum(noise.random() < share for _ in range(num_answers)) / num_answers

        names = ("identical_siblings", "equal_answers", "refusals", "tool_errors")
        return {name: sample() for name in names}

    assert sum(run(figures, seed) != [] for seed in range(50)) <= 1


@given(st.lists(st.dictionaries(st.sampled_from(sorted(TROUBLES)), st.floats()), max_size=80))
@example([dict.fromkeys(TROUBLES, value) for value in (0.0, 1e160, sys.float_info.max) * 20])
def test_any_numbers_leave_the_detectors_working_and_their_memory_bounded(
    steps: list[Figures],
) -> None:
    bank = DetectorBank(RULES)
    for step, figures in enumerate(steps):
        named = {
            figure: value for name, value in figures.items() for figure in DETECTORS[name].figures
        }
        for alarm in bank.step_trained(step, step, named):
            assert math.isfinite(alarm.value)
    for trend in bank.trends.values():
        assert len(trend.first) <= RULES.baseline_steps
        assert len(trend.latest) <= RULES.window_steps
    assert set(bank.active) <= set(THRESHOLDS)


def test_the_second_judge_needs_no_first_steps() -> None:
    bank = DetectorBank(RULES)
    window = RULES.window_steps
    steps = [bank.step_trained(step, step, {"judge_agreement": 0.3}) for step in range(window)]
    assert [alarm.detector for alarm in steps[-1]] == ["second_judge"]
    assert not any(steps[:-1])
    assert bank.trends["judge_agreement"].first == []


def test_longer_answers_without_higher_rewards_are_no_trouble() -> None:
    def figures(step: int, noise: random.Random) -> Figures:
        own = with_trouble("length_growth")(step, noise)
        return own | {"reward_mean": 0.5 + noise.gauss(0, 0.02)}

    assert run(figures) == []


def test_an_alarm_begins_again_only_after_it_has_ended() -> None:
    def figures(step: int, noise: random.Random) -> Figures:
        # The share swings around the threshold, later goes back, and rises again.
        swing = [0.32] * 10 + [0.2] * 10
        means = [0.05] * 40 + 2 * swing + [0.05] * 40 + [0.4] * 40
        return {"refusals": means[step] + noise.gauss(0, 0.01)}

    alarms = run(figures, steps=range(160))
    assert [alarm.detector for alarm in alarms] == ["refusals"] * 2
    assert alarms[0].step < 80
    assert alarms[1].step >= 120


def test_a_rate_of_entropy_that_falls_by_half_is_no_collapse() -> None:
    def figures(step: int, noise: random.Random) -> Figures:
        return {"entropy": 1.0 - 0.5 * step / NUM_STEPS + noise.gauss(0, 0.01)}

    assert run(figures) == []


def test_a_threshold_of_the_settings_is_used() -> None:
    def figures(step: int, noise: random.Random) -> Figures:
        return {"refusals": (0.05 if step < ONSET else 0.2) + noise.gauss(0, 0.01)}

    assert run(figures) == []
    lower = DetectorBank(replace(RULES, thresholds={"refusals": 0.1}))
    assert [alarm.threshold for alarm in run(figures, bank=lower)] == [0.1]


def test_a_detector_that_is_off_stays_quiet() -> None:
    others = {name: value for name, value in THRESHOLDS.items() if name != "refusals"}
    bank = DetectorBank(replace(RULES, thresholds=others))
    assert run(with_trouble("refusals"), bank=bank) == []


def trained(bank: DetectorBank, reward: float) -> None:
    """Train steps until the latest ones all have this reward."""
    for step in range(RULES.baseline_steps + RULES.window_steps):
        bank.step_trained(step, step, {"reward_mean": reward})


def test_rewards_that_rise_in_training_alone_are_a_gap_to_held_out_rows() -> None:
    bank = DetectorBank(RULES)
    trained(bank, 0.4)
    assert bank.held_out_measured(30, HeldOutMean(0, 0.5, 0.01, 100)) == []
    trained(bank, 0.7)
    (alarm,) = bank.held_out_measured(60, HeldOutMean(40, 0.51, 0.01, 100))
    assert (alarm.detector, alarm.step, alarm.version) == ("held_out_gap", 60, 40)
    assert alarm.value == pytest.approx(0.29)
    assert bank.held_out_measured(61, HeldOutMean(40, 0.5, 0.01, 120)) == []  # the same episode


def test_held_out_rewards_that_rise_too_are_no_gap() -> None:
    bank = DetectorBank(RULES)
    trained(bank, 0.4)
    assert bank.held_out_measured(30, HeldOutMean(0, 0.5, 0.01, 100)) == []
    trained(bank, 0.7)
    assert bank.held_out_measured(60, HeldOutMean(40, 0.78, 0.01, 100)) == []


@pytest.mark.parametrize("mean", [HeldOutMean(40, 0.51, 0.2, 100), HeldOutMean(40, 0.51, 0.01, 5)])
def test_a_gap_that_chance_may_explain_is_no_alarm(mean: HeldOutMean) -> None:
    bank = DetectorBank(RULES)
    trained(bank, 0.4)
    bank.held_out_measured(30, HeldOutMean(0, 0.5, 0.01, 100))
    trained(bank, 0.7)
    assert bank.held_out_measured(60, mean) == []


@pytest.mark.parametrize("change", [DetectorBank.training_went_back, DetectorBank.rewards_changed])
def test_versions_from_before_a_change_are_not_compared_with_later_rewards(
    change: Callable[[DetectorBank], None],
) -> None:
    bank = DetectorBank(RULES)
    trained(bank, 0.4)
    bank.held_out_measured(30, HeldOutMean(0, 0.5, 0.01, 100))
    change(bank)
    trained(bank, 0.7)
    trained(bank, 0.7)
    assert bank.held_out_measured(60, HeldOutMean(1, 0.5, 0.01, 100)) == []
    assert [one.held_out.version for one in bank.evaluated] in ([0], [])


def test_more_rows_of_a_version_are_compared_with_the_training_reward_of_its_own_time() -> None:
    bank = DetectorBank(RULES)
    trained(bank, 0.4)
    bank.held_out_measured(30, HeldOutMean(20, 0.5, 0.01, 100))
    trained(bank, 0.7)
    assert bank.held_out_measured(60, HeldOutMean(20, 0.5, 0.01, 200)) == []
    assert [one.reward for one in bank.evaluated] == [pytest.approx(0.4)]


def test_after_a_change_of_the_rewards_the_first_steps_begin_anew() -> None:
    bank = DetectorBank(RULES)
    run(with_trouble("refusals"), bank=bank)
    assert "refusals" in bank.active
    bank.rewards_changed()
    assert bank.active == {}

    def refusing(step: int, noise: random.Random) -> Figures:
        return {"refusals": 0.5 + noise.gauss(0, 0.05)}

    assert run(refusing, bank=bank) == []


def test_after_a_return_the_same_trouble_raises_a_new_alarm() -> None:
    bank = DetectorBank(RULES)
    assert len(run(with_trouble("refusals"), bank=bank)) == 1
    bank.training_went_back()
    assert run(healthy, bank=bank) == []
    assert len(run(with_trouble("refusals"), bank=bank)) == 1


def test_each_detector_has_an_action_and_a_threshold_in_the_settings() -> None:
    assert set(GuardThresholds.model_fields) == set(DETECTORS)
    assert set(GuardSection().actions) == set(DETECTORS)
    assert GuardThresholds().model_dump() == THRESHOLDS
