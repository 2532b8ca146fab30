"""Names of metrics in the curves, which users of verl know."""

from __future__ import annotations

import doctest
import math

from fakevllm_server.curves import metric_names
from fakevllm_server.curves.metric_names import OWN_PREFIX, VERL, curve_values


def test_the_docstring_example_holds() -> None:
    assert doctest.testmod(metric_names).failed == 0


def test_a_metric_that_verl_does_not_have_gets_our_prefix() -> None:
    assert curve_values(1, {"tie_rate": 0.5, "untrainable_tokens": 2.0}) == {
        "training/global_step": 1.0,
        "fakevllm/tie_rate": 0.5,
        "fakevllm/untrainable_tokens": 2.0,
    }


def test_a_metric_of_a_client_keeps_its_name() -> None:
    assert curve_values(1, {"train_tools": 2.0})["train_tools"] == 2.0


def test_verls_names_are_unique_and_without_our_prefix() -> None:
    verl_names = [name for group in VERL.values() for name in group]
    assert len(verl_names) == len(set(verl_names))
    assert not any(name.startswith(OWN_PREFIX) for name in verl_names)


def test_a_reward_before_its_kl_penalty_has_only_verls_name_for_a_score() -> None:
    values = curve_values(1, {"reward_mean": 0.5, "reward_kl_penalty": 0.1})
    assert values["critic/score/mean"] == 0.5
    assert "critic/rewards/mean" not in values
    assert values["fakevllm/reward_kl_penalty"] == 0.1


def test_a_loss_that_includes_kl_does_not_have_verls_name_for_the_policy_loss() -> None:
    values = curve_values(1, {"loss": 0.5, "kl": 0.1})
    assert values["actor/loss"] == 0.5
    assert values["actor/kl_loss"] == 0.1
    assert "actor/pg_loss" not in values
    assert curve_values(1, {"loss": 0.5})["actor/pg_loss"] == 0.5


def test_throughput_is_all_tokens_divided_by_the_time_of_the_step() -> None:
    values = curve_values(2, {"tokens_computed": 30.0, "tokens_saved": 70.0, "step_seconds": 4.0})
    assert values["perf/total_num_tokens"] == 100
    assert values["perf/throughput"] == 25
    assert values["perf/time_per_step"] == values["timing_s/step"] == 4
    first = curve_values(1, {"tokens_computed": 30.0, "tokens_saved": 70.0})
    assert "perf/throughput" not in first


def test_a_nan_is_kept() -> None:
    assert math.isnan(curve_values(1, {"grad_norm": math.nan})["actor/grad_norm"])
