"""Losses of jobs: defaults, contradictions, and settings without effect."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fakevllm_adapters.job.loss_spec import (
    DEMONSTRATION_LOSSES,
    LOSS_DEFAULTS,
    Bounds,
    LossSpec,
    loss_defaults,
)
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms import ESTIMATORS, NEEDS_GREEDY


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_agg_mode": "mean"}, "loss_agg_mode must be one of token-mean, token-sum"),
        ({"loss_unit": "row"}, "loss_unit must be one of call, timeline, episode, got 'row'"),
        ({"kl_loss_type": "k4"}, "kl_loss_type must be one of k1, "),
        ({"loss_scale_factor": 0.0}, "loss_scale_factor must be above 0"),
        ({"rollout_is": "token"}, "weigh the ratio of vanilla twice: set bypass_mode = false"),
        ({"rollout_is": "row", "bypass_mode": False}, "rollout_is must be one of token, sequence"),
        (
            {"name": "geo_mean", "rollout_is": "token", "bypass_mode": False},
            "one ratio for a sequence: set rollout_is = sequence",
        ),
        ({"rollout_is_threshold": "high"}, "must read HIGH or LOW_HIGH, got 'high'"),
        ({"rollout_is_threshold": "1_2_3"}, "must read HIGH or LOW_HIGH, got '1_2_3'"),
        ({"rollout_is_threshold": "5_0.5"}, "needs 0 < LOW <= HIGH, got '5_0.5'"),
        ({"rollout_is_threshold": "-1"}, "needs 0 < LOW <= HIGH, got '-1'"),
        ({"rollout_is_threshold": "nan"}, "needs 0 < LOW <= HIGH, got 'nan'"),
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": "1"}, "rollout_rs must be one of"),
        ({"rollout_rs": "token_k1"}, "must be one number, or one for each rollout_rs"),
        (
            {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "1,2,3"},
            "must be one number, or one for each rollout_rs",
        ),
        (
            {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2"},
            "of token_k3 is one number, got '0.5_2'",
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5"},
            "of seq_mean_k1 needs HIGH >= 1, or LOW_HIGH, got '0.5'",
        ),
    ],
)
def test_contradictory_or_invalid_settings_are_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        LossSpec(**settings)
    assert "\n" not in str(raised.value)


def test_each_rejection_has_its_own_threshold() -> None:
    spec = LossSpec(rollout_rs="token_k1, seq_mean_k3", rollout_rs_threshold="4, 0.1")
    assert spec.rejection_bounds == {
        "token_k1": Bounds(0.25, 4.0),
        "seq_mean_k3": Bounds(None, 0.1),
    }


@pytest.mark.parametrize("empty", ["", ",", " , "])
def test_an_empty_list_of_rejections_rejects_nothing(empty: str) -> None:
    assert LossSpec.of(TrainJob(rollout_rs=empty)).rejection_bounds == {}


def test_k1_bounds_may_both_be_below_one() -> None:
    spec = LossSpec(rollout_rs="token_k1", rollout_rs_threshold="0.5_0.9")
    assert spec.rejection_bounds == {"token_k1": Bounds(0.5, 0.9)}


def test_a_single_threshold_applies_to_all_rejections() -> None:
    spec = LossSpec(rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold="0.1")
    assert spec.rejection_bounds == dict.fromkeys(["token_k2", "seq_max_k3"], Bounds(None, 0.1))


@pytest.mark.parametrize(
    ("spec", "couples"),
    [
        (LossSpec(), False),
        (LossSpec(rollout_rs="token_k1", rollout_rs_threshold="2"), False),
        (LossSpec("gpg", rollout_is="token"), False),
        (LossSpec("gspo"), True),
        (LossSpec("geo_mean"), True),
        (LossSpec("gpg", rollout_is="sequence"), True),
        (LossSpec(rollout_rs="token_k1,seq_sum_k1", rollout_rs_threshold="2"), True),
    ],
)
def test_a_loss_or_correction_per_sequence_couples_tokens(spec: LossSpec, couples: bool) -> None:
    assert spec.couples_tokens is couples


def test_the_defaults_of_every_loss_are_valid() -> None:
    for name in LOSS_DEFAULTS:
        own = loss_defaults(name)
        assert LossSpec(name, own.clip_ratio_low, loss_agg_mode=own.loss_agg_mode).name == name


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss must be one of vanilla, gspo, .*, got 'ppo'"):
        loss_defaults("ppo")


def test_a_job_without_clip_ratios_gets_the_defaults_of_its_loss() -> None:
    spec = LossSpec.of(TrainJob(loss="gspo", clip_ratio_high=0.1))
    assert (spec.clip_ratio_low, spec.clip_ratio_high) == (3e-4, 0.1)
    assert spec.loss_agg_mode == "seq-mean-token-mean"
    assert LossSpec.of(TrainJob()) == LossSpec()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "sapo", "clip_ratio_low": 0.1}, "clip_ratio_low .* loss = sapo does not clip"),
        ({"loss": "gpg", "clip_ratio_high": 0.1}, "clip_ratio_high .* loss = gpg does not clip"),
        ({"loss": "gspo", "clip_ratio_c": 5.0}, "clip_ratio_c .* for loss = vanilla"),
        ({"tau_pos": 2.0}, "tau_pos .* for loss = sapo"),
        ({"loss": "gspo", "tau_neg": 2.0}, "tau_neg .* for loss = sapo"),
        ({"loss_scale_factor": 8.0}, "loss_scale_factor .* = seq-mean-token-sum-norm"),
        ({"rollout_is_threshold": "3"}, "rollout_is_threshold .* for rollout_is: take it out"),
        ({"rollout_rs_threshold": "3"}, "rollout_rs_threshold .* for rollout_rs: take it out"),
        ({"rollout_rs": ",", "rollout_rs_threshold": "3"}, "rollout_rs_threshold .* for rollout"),
        ({"gamma": 0.9}, "gamma .* for algorithm = reinforce_plus_plus: take it out"),
        ({"kl_coef": 0.1}, "kl_coef .* for use_kl_in_reward: take it out"),
        ({"max_response_length": 9}, "max_response_length .* for overlong_buffer_len: take it out"),
        ({"overlong_penalty_factor": 2.0}, "overlong_penalty_factor .* for overlong_buffer_len"),
        ({"max_num_gen_batches": 2}, "max_num_gen_batches .* for filter_groups = collect: take it"),
        ({"max_num_gen_batches": 2, "filter_groups": "drop"}, "max_num_gen_batches .* = collect: "),
    ],
)
def test_a_setting_without_effect_is_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        LossSpec.of(TrainJob(**settings))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "sapo", "tau_pos": 2.0, "tau_neg": 3.0},
        {"loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.3},
        {"clip_ratio_c": 5.0},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 8.0},
        {"loss": "gpg", "rollout_is": "token", "rollout_is_threshold": "3"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "3"},
    ],
)
def test_a_setting_with_effect_is_in_the_spec(settings: dict[str, Any]) -> None:
    spec = LossSpec.of(TrainJob(**settings))
    assert {name: getattr(spec, name) for name in settings if name != "loss"} == {
        name: value for name, value in settings.items() if name != "loss"
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "reinforce_plus_plus", "gamma": 0.9},
        {"use_kl_in_reward": True, "kl_coef": 0.1},
        {"overlong_buffer_len": 9, "max_response_length": 9, "overlong_penalty_factor": 2.0},
        {"filter_groups": True, "max_num_gen_batches": 2},
    ],
)
def test_reward_settings_with_effect_are_accepted(settings: dict[str, Any]) -> None:
    assert LossSpec.of(TrainJob(**settings)) == LossSpec()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlong_buffer_len": 9}, "overlong_buffer_len .*: set max_response_length too"),
        (
            {"overlong_buffer_len": 9, "max_response_length": 8},
            "overlong_buffer_len must not be above max_response_length",
        ),
    ],
)
def test_an_overlong_buffer_without_a_fitting_maximum_length_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        LossSpec.of(TrainJob(**settings))
    assert "\n" not in str(raised.value)


def test_the_job_accepts_exactly_the_losses_and_algorithms_that_exist() -> None:
    fields = TrainJob.model_fields
    assert set(get_args(fields["loss"].annotation)) == {*LOSS_DEFAULTS, *DEMONSTRATION_LOSSES}
    assert set(get_args(fields["algorithm"].annotation)) == set(ESTIMATORS)
    assert set(ESTIMATORS) >= NEEDS_GREEDY


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "sft", "demonstration_loss": "dpo"}, "loss = sft already trains demonstrations"),
        ({"loss": "sft", "preference_beta": 0.2}, "preference_beta = 0.2 would change nothing"),
        ({"demonstration_loss": "dpo", "desirable_weight": 2.0}, "desirable_weight = 2.0 would"),
        ({"demonstration_loss_coef": 0.5}, "demonstration_loss_coef = 0.5 would change nothing"),
        ({"loss": "kto", "kl_loss_coef": 0.1}, "kl_loss_coef = 0.1 .* loss = kto is no policy"),
        ({"loss": "dpo", "bypass_mode": False}, "bypass_mode = False would change nothing"),
        ({"loss": "sft", "loss_agg_mode": "token-sum"}, "loss_agg_mode = token-sum would change"),
    ],
)
def test_settings_that_a_demonstration_loss_does_not_use_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        LossSpec.of(TrainJob(**settings))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "name", "needs_reference"),
    [
        ({}, None, False),
        ({"loss": "sft"}, "sft", False),
        ({"loss": "dpo", "preference_beta": 0.2}, "dpo", True),
        ({"demonstration_loss": "kto", "undesirable_weight": 2.0}, "kto", True),
        ({"demonstration_loss": "sft", "demonstration_loss_coef": 0.1}, "sft", False),
        ({"loss": "kto", "bypass_mode": False, "use_kl_in_reward": True}, "kto", True),
    ],
)
def test_a_demonstration_loss_is_trained_alone_or_beside_a_policy_loss(
    settings: dict[str, Any], name: str | None, needs_reference: bool
) -> None:
    job = TrainJob(**settings)
    spec = LossSpec.of(job)
    assert spec.of_demonstrations == name
    assert spec.has_policy_loss == (job.loss == "vanilla")
    assert spec.needs_reference == needs_reference
    assert job.needs_reference == needs_reference
