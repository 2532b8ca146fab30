"""Every loss, aggregation, KL and correction, compared with verl's own function in float64."""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from swarm_server.backends.torch_losses.scored_calls import (
    GOLDEN,
    ScoredCall,
    new_of,
    spec_of,
    whole,
)
from swarm_server.samples import call as recorded
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fakevllm_adapters.job.loss_spec import AGGREGATIONS, LOSS_DEFAULTS, REJECTIONS, LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.torch_losses.importance_correction import importance_weights, is_kept
from fakevllm_server.backends.torch_losses.kl import kl_loss
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.backend import Call
from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode

pytestmark = pytest.mark.real


def close(expected: Any) -> Any:
    """Return an approximate comparison, because verl adds 1e-8 to denominators."""
    return pytest.approx(expected, rel=1e-6, abs=1e-6)


def sampled_calls(seed: int) -> list[ScoredCall]:
    random = Random(seed)
    calls: list[ScoredCall] = []
    for at, length in enumerate([1, 5, 2, 3]):
        sampled = [random.uniform(-3, 0) for _ in range(length)]
        new = [value + random.gauss(0, 0.5) for value in sampled]
        old = [value + random.gauss(0, 0.3) for value in sampled]
        calls.append(ScoredCall(sampled, new, random.gauss(0, 1), str(at), old=old))
    return calls


STEPS = [GOLDEN, *map(sampled_calls, range(4))]


def padded(rows: list[Any]) -> Tensor:
    return pad_sequence([torch.tensor(list(row), dtype=torch.float64) for row in rows], True)


def mask_of(calls: list[ScoredCall]) -> Tensor:
    return padded([[1.0] * len(call.new) for call in calls])


def verls(
    calls: list[ScoredCall], spec: LossSpec, old: Tensor, weights: Tensor | None = None
) -> Any:
    """Return verl's loss and the gradient of each token."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=spec.clip_ratio_low,
        clip_ratio_high=spec.clip_ratio_high,
        clip_ratio_c=spec.clip_ratio_c,
        tau_pos=spec.tau_pos,
        tau_neg=spec.tau_neg,
    )
    mask = mask_of(calls)
    new = padded([call.new for call in calls]).requires_grad_()
    loss, _ = get_policy_loss_fn(spec.name)(
        old_log_prob=old,
        log_prob=new,
        advantages=torch.tensor([[call.advantage] for call in calls]).double() * mask,
        response_mask=mask,
        loss_agg_mode=spec.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad[mask.bool()].tolist()


@pytest.mark.parametrize("calls", STEPS)
@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(LOSS_DEFAULTS))
def test_loss_and_gradient_equal_those_of_verl(
    name: str, mode: str, calls: list[ScoredCall]
) -> None:
    if name in ("sapo", "geo_mean"):  # verl has it built in
        mode = "seq-mean-token-mean"
    spec = spec_of(name, loss_agg_mode=mode)
    loss, gradient = verls(calls, spec, padded([call.logprobs for call in calls]))
    result, own = whole(calls, spec)
    assert result.loss.item() == close(loss)
    assert own == close(gradient)


@pytest.mark.parametrize("calls", STEPS[1:])
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("threshold", ["2.0", "0.5_2.0"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", sorted(LOSS_DEFAULTS))
def test_a_corrected_loss_equals_that_of_verl(
    name: str, level: str, threshold: str, is_normalised: bool, calls: list[ScoredCall]
) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    if name == "geo_mean":
        level = "sequence"
    own = spec_of(
        name,
        bypass_mode=False,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=is_normalised,
    )
    old = padded([call.old for call in calls])
    log_ratio = old - padded([call.logprobs for call in calls])
    weights, _ = compute_rollout_correction_weights(
        log_ratio, mask_of(calls), level, threshold, is_normalised
    )
    loss, gradient = verls(calls, own, old, weights)
    result, own_gradient = whole(calls, own)
    assert result.loss.item() == close(loss)
    assert own_gradient == close(gradient)


@pytest.mark.parametrize("calls", STEPS)
@pytest.mark.parametrize("threshold", [0.05, 0.3, 1.5])
@pytest.mark.parametrize("option", REJECTIONS)
def test_rejected_tokens_equal_those_of_verl(
    option: str, threshold: float, calls: list[ScoredCall]
) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    text = f"{1 / (1 + threshold)}_{1 + threshold}" if option.endswith("k1") else str(threshold)
    mask = mask_of(calls)
    log_ratio = padded([call.new for call in calls]) - padded([c.logprobs for c in calls])
    kept, _ = compute_rollout_rejection_mask(log_ratio, mask, option, text)
    units = torch.arange(len(calls)).repeat_interleave(mask.sum(1).long())
    spec = LossSpec(rollout_rs=option, rollout_rs_threshold=text)
    assert (
        is_kept(log_ratio[mask.bool()], units, spec).tolist() == kept[mask.bool()].bool().tolist()
    )


@pytest.mark.parametrize("calls", STEPS)
@pytest.mark.parametrize("threshold", ["1.1", "0.9_1.5"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_equal_those_of_verl(
    level: str, threshold: str, calls: list[ScoredCall]
) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    mask = mask_of(calls)
    log_ratio = padded([call.new for call in calls]) - padded([c.logprobs for c in calls])
    expected, _ = compute_rollout_correction_weights(log_ratio, mask, level, threshold)
    units = torch.arange(len(calls)).repeat_interleave(mask.sum(1).long())
    spec = LossSpec("gpg", rollout_is=level, rollout_is_threshold=threshold)
    result = importance_weights(log_ratio[mask.bool()], units, spec)
    assert result.tolist() == pytest.approx(expected[mask.bool()].tolist())


@pytest.mark.parametrize("name", ["k1", "kl", "k2", "mse", "k3", "low_var_kl", "k1+", "k3+"])
def test_kl_equals_that_of_verl(name: str) -> None:
    from verl.trainer.ppo.core_algos import kl_penalty

    reference = torch.linspace(-4, 0, 9, dtype=torch.float64)
    result, expected = (
        torch.linspace(-1, -3, 9, dtype=torch.float64).requires_grad_() for _ in range(2)
    )
    own, theirs = kl_loss(result, reference, name), kl_penalty(expected, reference, name)
    (own * reference).sum().backward()
    (theirs * reference).sum().backward()
    torch.testing.assert_close(own, theirs)
    torch.testing.assert_close(result.grad, expected.grad)


def test_the_whole_loss_equals_that_of_verl() -> None:
    """Policy, KL and entropy as verl's workers add them."""
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    random = Random(7)
    calls = [
        replace(
            call,
            reference=[value + random.gauss(0, 0.5) for value in call.new],
            entropy=[random.uniform(0, 2) for _ in call.new],
        )
        for call in sampled_calls(5)
    ]
    spec = spec_of("vanilla", kl_loss_coef=0.3, entropy_coeff=0.2, clip_ratio_high=0.2)
    loss, _ = verls(calls, spec, padded([call.logprobs for call in calls]))
    mask = mask_of(calls)
    new = padded([call.new for call in calls])
    kl = kl_penalty(new, padded([call.reference for call in calls]), "low_var_kl")
    loss += 0.3 * agg_loss(kl, mask, "token-mean").item()
    loss -= 0.2 * agg_loss(padded([call.entropy for call in calls]), mask, "token-mean").item()
    assert whole(calls, spec)[0].loss.item() == close(loss)
    assert new_of(calls).shape == (int(mask.sum()),)


@pytest.mark.parametrize("regularizers", [{}, {"kl_loss_coef": 0.3, "entropy_coeff": 0.2}])
@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", ["vanilla", "cispo", "gpg"])
def test_a_kept_tied_group_has_the_rows_that_it_has_in_verl(
    name: str, mode: str, regularizers: dict[str, float]
) -> None:
    """verl leaves the rows of a tied group in its batch, with advantage 0. A step that keeps the
    group has verl's gradient with these rows. A step that drops the group has verl's gradient
    without them."""
    kept, dropped = kept_and_dropped(TrainJob.model_validate(regularizers))
    spec = spec_of(name, loss_agg_mode=mode, **regularizers)
    assert [call.advantage for call in kept[2:]] == [0.0, 0.0]
    gradients: list[list[float]] = []
    for calls in (kept, dropped):
        result, own = whole(calls, spec)
        loss, gradient = verls_with_regularizers(calls, spec)
        assert result.loss.item() == close(loss)
        assert own == close(gradient)
        gradients.append(own[: sum(len(call.new) for call in dropped)])
    assert (gradients[0] == close(gradients[1])) == (mode == "token-sum")


def kept_and_dropped(job: TrainJob) -> tuple[list[ScoredCall], list[ScoredCall]]:
    """Plan one step with a tied group and one step without it. Return the calls of both, with
    made-up log-probabilities. The calls of the tied group are the longest ones."""
    random = Random(3)
    numbers: dict[str, dict[str, list[float]]] = {}
    groups = [
        FinishedGroup(
            group,
            [
                ScoredEpisode(at, reward, [recorded(ids=tuple(range(5, 5 + length)))])
                for at, (reward, length) in enumerate(episodes)
            ],
        )
        for group, episodes in {"mixed": [(1.0, 2), (0.0, 3)], "tied": [(0.5, 4), (0.5, 1)]}.items()
    ]

    def scored(call: Call) -> ScoredCall:
        assert call.unit is not None
        if call.unit not in numbers:
            new = [random.uniform(-3, 0) for _ in call.response_ids]
            numbers[call.unit] = {
                "new": new,
                "logprobs": [value + random.gauss(0, 0.3) for value in new],
                "reference": [value + random.gauss(0, 0.3) for value in new],
                "entropy": [random.uniform(0, 2) for _ in new],
            }
        own = numbers[call.unit]
        return ScoredCall(
            own["logprobs"],
            own["new"],
            call.advantage,
            call.unit,
            call.weight,
            reference=own["reference"] if job.kl_loss_coef else None,
            entropy=own["entropy"],
        )

    kept, dropped = (
        [scored(call) for call in plan_step(1, chosen, job).batch.calls]
        for chosen in (groups, groups[:1])
    )
    return kept, dropped


def verls_with_regularizers(calls: list[ScoredCall], spec: LossSpec) -> tuple[float, list[float]]:
    """Return verl's loss with KL and entropy, and the gradient of each token. The entropies have no
    gradient here."""
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    loss, gradient = verls(calls, spec, padded([call.logprobs for call in calls]))
    if spec.kl_loss_coef == 0:
        return loss, gradient
    mask = mask_of(calls)
    new = padded([call.new for call in calls]).requires_grad_()
    reference = padded([call.reference for call in calls])
    kl = agg_loss(kl_penalty(new, reference, spec.kl_loss_type), mask, spec.loss_agg_mode)
    entropy = agg_loss(padded([call.entropy for call in calls]), mask, spec.loss_agg_mode)
    (spec.kl_loss_coef * kl).backward()
    assert new.grad is not None
    added = new.grad[mask.bool()].tolist()
    return (
        loss + (spec.kl_loss_coef * kl - spec.entropy_coeff * entropy).item(),
        [first + second for first, second in zip(gradient, added, strict=True)],
    )
