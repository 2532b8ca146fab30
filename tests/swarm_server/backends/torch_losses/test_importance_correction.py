"""Importance weights and rejection, compared with golden numbers from verl 0.9.1's own functions in
float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from swarm_server.backends.torch_losses.scored_calls import ScoredCall, spec_of, whole

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.importance_correction import importance_weights, is_kept

ENGINE = [-1, -2, -0.5, -1.5, -0.2, -1.2]
TRAINER = [-0.9, -2.1, -1, -0.4, -0.2, -0.1]
LOG_RATIO = torch.tensor(TRAINER, dtype=torch.float64) - torch.tensor(ENGINE, dtype=torch.float64)
UNITS = torch.tensor([0, 0, 1, 1, 1, 2])


def correcting(**settings: Any) -> LossSpec:
    return LossSpec("gpg", **settings)


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", "2.0", [1.105171, 0.904837, 0.606531, 2, 1, 2]),
        ("sequence", "2.0", [1, 1, 1.822119, 1.822119, 1.822119, 2]),
        ("token", "0.5_2", [1.105171, 0.904837, 0.606531, 0, 1, 0]),
        ("sequence", "0.5_2", [1, 1, 1.822119, 1.822119, 1.822119, 0]),
    ],
)
def test_importance_weights_equal_golden_numbers(
    level: str, threshold: str, expected: list[float]
) -> None:
    spec = correcting(rollout_is=level, rollout_is_threshold=threshold)
    result = importance_weights(LOG_RATIO, UNITS, spec)
    assert result.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # The weights are divided by the mean over six tokens.
        ("token", [1.105171, 0.904837, 0.606531, 2, 1, 2]),
        # The weights are divided by the mean over three sequences.
        ("sequence", [1, 1, 1.822119, 1.822119, 1.822119, 2]),
    ],
)
def test_importance_weights_may_be_divided_by_their_mean(level: str, expected: list[float]) -> None:
    calls = [
        ScoredCall(ENGINE[:2], TRAINER[:2], -1.0, "a", old=TRAINER[:2]),
        ScoredCall(ENGINE[2:5], TRAINER[2:5], -1.0, "b", old=TRAINER[2:5]),
        ScoredCall(ENGINE[5:], TRAINER[5:], -1.0, "c", old=TRAINER[5:]),
        ScoredCall([-1.0], [9.0], -1.0, "out", weight=0.0, old=[50.0]),
    ]
    settings = {"loss_agg_mode": "token-sum", "bypass_mode": False, "rollout_is": level}
    mean = sum(expected) / 6 if level == "token" else (1 + 1.822119 + 2) / 3
    result, gradient = whole(calls, spec_of("gpg", rollout_is_batch_normalize=True, **settings))
    assert gradient == pytest.approx([weight / mean for weight in expected] + [0], abs=1e-5)
    metric = result.metrics["rollout_is_weight"].item()
    assert metric == pytest.approx(sum(expected) / 6, abs=1e-5), "the mean before the division"


def test_importance_weights_that_are_all_zero_stay_zero() -> None:
    calls = [ScoredCall([-1.0], [-9.0], 1.0, "a", old=[-9.0])]
    spec = spec_of(
        "gpg",
        bypass_mode=False,
        rollout_is="token",
        rollout_is_threshold="0.5_2",
        rollout_is_batch_normalize=True,
    )
    result, gradient = whole(calls, spec)
    assert (result.loss.item(), gradient) == (0, [0])


@pytest.mark.parametrize(
    ("options", "threshold", "expected"),
    [
        ("token_k1", "0.5_2", [1, 1, 1, 0, 1, 0]),
        ("seq_sum_k1", "0.5_2", [1, 1, 1, 1, 1, 0]),
        ("seq_mean_k1", "0.999_1.001", [1, 1, 0, 0, 0, 0]),
        ("seq_mean_k3", "0.1", [1, 1, 0, 0, 0, 0]),
        ("seq_max_k2", "0.4", [1, 1, 0, 0, 0, 0]),
        ("token_k1,seq_mean_k3", "0.5_2,0.4", [1, 1, 1, 0, 1, 0]),
    ],
)
def test_rejection_equals_golden_numbers(options: str, threshold: str, expected: list[int]) -> None:
    spec = correcting(rollout_rs=options, rollout_rs_threshold=threshold)
    assert is_kept(LOG_RATIO, UNITS, spec).tolist() == [bool(kept) for kept in expected]


CALLS = [
    ScoredCall(ENGINE[:2], TRAINER[:2], 1.0, "a"),
    ScoredCall(ENGINE[2:5], TRAINER[2:5], -0.5, "b"),
    ScoredCall(ENGINE[5:], TRAINER[5:], -2.0, "c"),
]
PLAIN = [-1 / 6, -1 / 6, 0.5 / 6, 0.5 / 6, 0.5 / 6, 2 / 6]


def test_a_loss_without_a_ratio_is_weighted_by_the_trained_policy_without_a_gradient() -> None:
    result, gradient = whole(CALLS, spec_of("gpg", rollout_is="token"))
    weights = [1.105171, 0.904837, 0.606531, 2, 1, 2]
    expected = [weight * plain for weight, plain in zip(weights, PLAIN, strict=True)]
    assert gradient == pytest.approx(expected, abs=1e-5)
    assert result.metrics["rollout_is_weight"].item() == pytest.approx(sum(weights) / 6, abs=1e-5)


def test_a_loss_with_a_ratio_is_weighted_by_the_old_policy() -> None:
    moved = [replace(call, old=call.new, new=[p - 0.1 for p in call.new]) for call in CALLS]
    plain = whole(moved, spec_of("vanilla", bypass_mode=False))[1]
    weighted = whole(moved, spec_of("vanilla", bypass_mode=False, rollout_is="token"))[1]
    weights = [w / p for w, p in zip(weighted, plain, strict=True)]
    assert weights == pytest.approx([1.105171, 0.904837, 0.606531, 2, 1, 2], abs=1e-5)


def test_a_rejected_token_is_in_no_term_but_stays_in_the_mean() -> None:
    calls = [replace(call, reference=[-0.3] * len(call.new), entropy=call.new) for call in CALLS]
    spec = spec_of(
        "gpg",
        kl_loss_coef=0.1,
        entropy_coeff=0.1,
        rollout_rs="seq_sum_k1",
        rollout_rs_threshold="0.5_2",
    )
    result, gradient = whole(calls, spec)
    everything = whole(calls, replace(spec, rollout_rs=None))[1]
    assert gradient[:5] == pytest.approx(everything[:5])
    assert gradient[5] == 0 != everything[5]
    assert result.metrics["rollout_rs_rejected"].item() == pytest.approx(1 / 6)
