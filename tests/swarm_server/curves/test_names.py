"""Metrics under the names that verl's users look for."""

from __future__ import annotations

import doctest
import math

from fakevllm_server.curves import names
from fakevllm_server.curves.names import OWN, VERL, charted


def test_the_example_in_its_docstring_holds() -> None:
    assert doctest.testmod(names).failed == 0


def test_what_verl_has_no_name_for_is_charted_under_our_own() -> None:
    assert charted(1, {"tie_rate": 0.5, "untrainable_tokens": 2.0}) == {
        "training/global_step": 1.0,
        "fakevllm/tie_rate": 0.5,
        "fakevllm/untrainable_tokens": 2.0,
    }


def test_what_clients_measure_keeps_its_name() -> None:
    assert charted(1, {"train_tools": 2.0})["train_tools"] == 2.0


def test_no_name_is_given_twice_and_none_is_ours() -> None:
    given = [name for names_of in VERL.values() for name in names_of]
    assert len(given) == len(set(given))
    assert not any(name.startswith(OWN) for name in given)


def test_a_reward_before_its_kl_is_no_reward_of_verls_but_a_score() -> None:
    told = charted(1, {"reward_mean": 0.5, "reward_kl_penalty": 0.1})
    assert told["critic/score/mean"] == 0.5
    assert "critic/rewards/mean" not in told
    assert told["fakevllm/reward_kl_penalty"] == 0.1


def test_a_loss_with_kl_in_it_is_not_called_the_policys() -> None:
    told = charted(1, {"loss": 0.5, "kl": 0.1})
    assert told["actor/loss"] == 0.5
    assert told["actor/kl_loss"] == 0.1
    assert "actor/pg_loss" not in told
    assert charted(1, {"loss": 0.5})["actor/pg_loss"] == 0.5


def test_throughput_is_of_all_tokens_over_the_whole_step() -> None:
    told = charted(2, {"tokens_computed": 30.0, "tokens_saved": 70.0, "step_seconds": 4.0})
    assert told["perf/total_num_tokens"] == 100
    assert told["perf/throughput"] == 25
    assert told["perf/time_per_step"] == told["timing_s/step"] == 4
    first = charted(1, {"tokens_computed": 30.0, "tokens_saved": 70.0})
    assert "perf/throughput" not in first


def test_a_number_that_is_none_is_charted_as_it_is() -> None:
    assert math.isnan(charted(1, {"grad_norm": math.nan})["actor/grad_norm"])
