"""The loss of a step depends on its calls, and not on how they are packed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.backends.torch_losses.scored_calls import (
    GOLDEN,
    ScoredCall,
    new_of,
    part,
    shares_of,
    spec_of,
    whole,
)

from fakevllm_adapters.job.loss_spec import AGGREGATIONS, LOSS_DEFAULTS, LossSpec
from fakevllm_server.backends.torch_losses import LOSSES
from fakevllm_server.backends.torch_losses.aggregate import token_mean
from fakevllm_server.backends.torch_losses.step_loss import SplitUnit, StepLoss

pytestmark = pytest.mark.timeout(600)  # many small examples, also on a slow machine
few = settings(max_examples=50)


@st.composite
def steps(draw: st.DrawFn) -> list[ScoredCall]:
    """Draw calls of which some are duplicates, some have no tokens and some do not count."""
    shapes = st.tuples(
        st.integers(0, 4), st.sampled_from("abcde"), st.sampled_from([0.0, 0.5, 1.0])
    )
    random = Random(draw(st.integers(0, 2**32)))
    calls: list[ScoredCall] = []
    for length, unit, weight in draw(st.lists(shapes, min_size=1, max_size=6)):
        rows = [[random.uniform(-5, 0) for _ in range(length)] for _ in range(5)]
        logprobs, new, old, reference, entropy = rows
        advantage = random.choice([0.0, random.uniform(-2, 2)])
        calls.append(ScoredCall(logprobs, new, advantage, unit, weight, old, reference, entropy))
    return calls + draw(st.lists(st.sampled_from(calls), max_size=2))


@st.composite
def specs(draw: st.DrawFn) -> LossSpec:
    name = draw(st.sampled_from(sorted(LOSS_DEFAULTS)))
    levels = [None, "sequence"] if name == "geo_mean" else [None, "token", "sequence"]
    return spec_of(
        name,
        loss_agg_mode=draw(st.sampled_from(AGGREGATIONS)),
        kl_loss_coef=draw(st.sampled_from([0.0, 0.1])),
        kl_loss_type=draw(st.sampled_from(["k1", "k2", "k3", "k3+"])),
        entropy_coeff=draw(st.sampled_from([0.0, 0.05])),
        bypass_mode=False,
        rollout_is=draw(st.sampled_from(levels)),
        rollout_is_threshold=draw(st.sampled_from(["2.0", "0.5_5"])),
        rollout_rs=draw(st.sampled_from([None, "token_k1", "seq_mean_k3,token_k2"])),
        rollout_rs_threshold="2.5",
    )


def in_pieces(
    calls: Sequence[ScoredCall], piece_of: Sequence[int], spec: LossSpec
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Return the step's loss, each call's gradient and the metrics, summed over micro-batches."""
    shares = shares_of(calls, spec)
    loss, metrics = 0.0, defaultdict[str, float](float)
    gradients: list[list[float]] = [[] for _ in calls]
    for piece in set(piece_of):
        places = [at for at, own in enumerate(piece_of) if own == piece]
        own = [calls[at] for at in places]
        new = new_of(own)
        result = part(own, [shares[at] for at in places], spec, new)
        result.loss.backward()
        loss += result.loss.item()
        for name, value in result.metrics.items():
            metrics[name] += value.item()
        assert new.grad is not None
        rows = new.grad.split([len(call.new) for call in own])
        for at, row in zip(places, rows, strict=True):
            gradients[at] = row.tolist()
    return loss, gradients, dict(metrics)


@few
@given(steps(), specs(), st.data())
def test_any_packing_gives_the_same_loss_and_gradient(
    calls: list[ScoredCall], spec: LossSpec, data: st.DataObject
) -> None:
    """Only a loss that couples the tokens of a unit keeps its calls together."""
    pieces = st.integers(0, 3)
    if spec.couples_tokens:
        of_unit = {unit: data.draw(pieces) for unit in "abcde"}
        piece_of = [of_unit[call.unit] for call in calls]
    else:
        piece_of = [data.draw(pieces) for _ in calls]
    at_once, gradient = whole(calls, spec)
    loss, gradients, metrics = in_pieces(calls, piece_of, spec)
    assert loss == pytest.approx(at_once.loss.item(), rel=1e-9, abs=1e-9)
    assert list(chain(*gradients)) == pytest.approx(gradient, rel=1e-9, abs=1e-9)
    assert metrics == pytest.approx(
        {name: value.item() for name, value in at_once.metrics.items()}, abs=1e-9
    )
    assert math.isfinite(loss)


@few
@given(steps(), specs(), st.integers(0, 100))
def test_the_order_of_calls_does_not_matter(
    calls: list[ScoredCall], spec: LossSpec, seed: int
) -> None:
    order = list(range(len(calls)))
    Random(seed).shuffle(order)
    loss, gradients, _ = in_pieces(calls, [0] * len(calls), spec)
    shuffled, moved, _ = in_pieces([calls[at] for at in order], [0] * len(calls), spec)
    assert shuffled == pytest.approx(loss, rel=1e-9, abs=1e-9)
    for place, at in enumerate(order):
        assert moved[place] == pytest.approx(gradients[at], rel=1e-9, abs=1e-9)


def joined(calls: Sequence[ScoredCall]) -> list[ScoredCall]:
    """Return one call per unit, with the tokens of all its calls."""
    units = defaultdict[str, list[ScoredCall]](list)
    for call in calls:
        units[call.unit].append(call)
    return [
        replace(
            own[0],
            **{
                name: [value for call in own for value in getattr(call, name)]
                for name in ("logprobs", "new", "old", "reference", "entropy")
            },
        )
        for own in units.values()
    ]


@few
@given(steps(), specs())
def test_a_timeline_has_the_same_loss_in_one_call_or_in_several(
    calls: list[ScoredCall], spec: LossSpec
) -> None:
    advantages = {call.unit: call.advantage for call in calls}
    calls = [replace(call, weight=1.0, advantage=advantages[call.unit]) for call in calls]
    calls.sort(key=lambda call: call.unit)
    in_calls, gradient = whole(calls, spec)
    in_one, merged = whole(joined(calls), spec)
    assert in_one.loss.item() == pytest.approx(in_calls.loss.item(), rel=1e-9, abs=1e-9)
    assert merged == pytest.approx(gradient, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_a_sequence_level_loss_depends_on_the_units(name: str) -> None:
    apart = whole(GOLDEN, spec_of(name))[0].loss.item()
    together = [replace(call, unit="a") for call in GOLDEN]
    assert whole(together, spec_of(name))[0].loss.item() != pytest.approx(apart, abs=1e-3)


def test_a_sequence_level_loss_refuses_part_of_a_sequence() -> None:
    calls = [replace(call, unit="a") for call in GOLDEN]
    spec = spec_of("gspo", loss_unit="timeline")
    shares = shares_of(calls, spec)
    with pytest.raises(SplitUnit, match="gspo with loss_unit timeline needs all calls of a timel"):
        part(calls[:1], shares[:1], spec, new_of(calls[:1]))


def test_batch_normalized_weights_refuse_part_of_a_step() -> None:
    spec = spec_of("gpg", rollout_is="token", rollout_is_batch_normalize=True)
    calls = [replace(GOLDEN[0], weight=0.0), *GOLDEN]
    shares = shares_of(calls, spec)
    with pytest.raises(SplitUnit, match="rollout_is_batch_normalize needs all calls of a step"):
        part(calls[:3], shares[:3], spec, new_of(calls[:3]))
    part(calls[1:], shares[1:], spec, new_of(calls[1:]))  # the omitted call does not count
    nothing = part(calls[:1], shares[:1], spec, new_of(calls[:1]))
    assert nothing.loss.item() == 0


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_tokens_that_do_not_count_may_be_nan_or_infinite(name: str) -> None:
    wild = ScoredCall([-1.0, -1.0], [float("nan"), float("inf")], 1.0, "b", weight=0.0)
    result, gradient = whole([GOLDEN[0], wild, GOLDEN[1]], spec_of(name))
    alone, expected = whole(GOLDEN[:2], spec_of(name))
    assert result.loss.item() == alone.loss.item()
    assert gradient == [*expected[:2], 0.0, 0.0, *expected[2:]]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_batch_without_counted_tokens_has_a_loss_of_zero(name: str) -> None:
    for calls in ([], [ScoredCall([], [], 1.0, "a")], [replace(GOLDEN[0], weight=0.0)]):
        result, gradient = whole(calls, spec_of(name))
        assert result.loss.item() == 0.0
        assert not any(gradient)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_impossible_stale_token_keeps_loss_and_gradient_finite(name: str) -> None:
    for far in (-1e4, 1e4):
        for advantage in (1.0, -1.0):
            call = ScoredCall([-1.0 + far], [-1.0], advantage, "a")
            result, gradient = whole([call], spec_of(name))
            assert math.isfinite(result.loss.item())
            assert all(map(math.isfinite, gradient))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_pushes_as_the_plain_policy_gradient(name: str) -> None:
    calls = [replace(call, new=call.logprobs) for call in GOLDEN]
    plain = whole(calls, spec_of("gpg", loss_agg_mode="seq-mean-token-mean"))[1]
    result = whole(calls, spec_of(name, loss_agg_mode="seq-mean-token-mean"))[1]
    assert result == pytest.approx(plain)


def test_advantages_may_differ_from_token_to_token() -> None:
    """Some calls have an advantage per token, others a single one."""
    advantages = ([1.0, 2.0], 3.0, [6.0])
    calls = [
        replace(call, advantage=advantage)
        for call, advantage in zip(GOLDEN, advantages, strict=True)
    ]
    gradient = whole(calls, spec_of("gpg"))[1]
    assert [value * -6 for value in gradient] == pytest.approx([1, 2, 3, 3, 3, 6])


def test_a_wrong_number_of_advantages_is_refused() -> None:
    calls = [replace(GOLDEN[0], advantage=[1.0]), replace(GOLDEN[2], advantage=[1.0, 2.0])]
    with pytest.raises(AssertionError, match="an advantage for each token"):
        whole(calls, spec_of("gpg"))


def test_without_old_log_probs_the_current_policy_is_the_old_policy() -> None:
    spec = spec_of("vanilla", bypass_mode=False)
    assert whole(GOLDEN, spec)[1] == pytest.approx(
        whole([replace(call, old=call.new) for call in GOLDEN], spec)[1]
    )


def test_the_entropy_bonus_pulls_entropy_up() -> None:
    calls = [replace(call, entropy=[1.0] * len(call.new)) for call in GOLDEN]
    plain: StepLoss = whole(calls, spec_of("gpg"))[0]
    with_bonus = whole(calls, spec_of("gpg", entropy_coeff=0.5))[0]
    assert with_bonus.loss.item() == pytest.approx(plain.loss.item() - 0.5)


def test_token_means_of_micro_batches_add_up_to_that_of_the_batch() -> None:
    values = torch.arange(12, dtype=torch.float64).view(4, 3)
    weights = torch.tensor([[1, 1, 0], [0.5, 0.5, 0.5], [1, 0, 0], [1, 1, 1]], dtype=torch.float64)
    total = weights.sum()

    shares = [token_mean(values[i : i + 1], weights[i : i + 1], total) for i in range(4)]

    assert sum(share.item() for share in shares) == pytest.approx(
        token_mean(values, weights).item()
    )


def test_nan_and_infinity_outside_the_mask_do_not_change_the_mean() -> None:
    values = torch.tensor([[1.0, float("inf")], [float("nan"), 3.0]])

    assert token_mean(values, torch.tensor([[1.0, 0.0], [0.0, 1.0]])).item() == 2.0
