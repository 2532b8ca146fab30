"""Every loss has the same value and gradient from a forest as from the calls alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from swarm_server.backends.torch_forest.tiny_models import MODELS, build_model, gradient_of, naive
from swarm_server.backends.torch_losses.scored_calls import ScoredCall, flat, shares_of, spec_of
from swarm_server.forest.call_sets import GOLDEN, call_sets
from torch import Tensor

from fakevllm_adapters.job.loss_spec import AGGREGATIONS, UNITS, LossSpec
from fakevllm_server.backends.torch_forest.attention.registry import ATTENTIONS
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_log_probs
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_losses import LOSSES
from fakevllm_server.backends.torch_losses.step_loss import step_loss
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens
from fakevllm_server.forest import CallTokens, build_forest

Gather = Callable[[Plan, Tensor], Tensor]

CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-9}
ON_CPU = sorted(ATTENTIONS.keys() - {"flex"})


@cache
def model_of(name: str) -> Any:
    return build_model(MODELS[name])


def keep_first(plan: Plan, of_edges: Tensor) -> Tensor:
    """A wrong gather that trains a token shared by several calls only for the first call."""
    flat, trained = plan.flat(of_edges), set[int]()
    is_first = [not (edge in trained or trained.add(edge)) for edge in plan.gather.tolist()]
    return torch.where(torch.tensor(is_first, dtype=torch.bool), flat, flat.detach())


def scored(calls: Sequence[CallTokens], random: Random) -> list[ScoredCall]:
    """Return calls with random log-probabilities, some of them different enough to be clipped."""

    def near(count: int) -> list[float]:
        return [-2.3 + 0.4 * random.gauss(0, 1) for _ in range(count)]

    counts = [sum(end - start for start, end in call.trained) for call in calls]
    return [
        ScoredCall(
            near(count),
            [],
            random.gauss(0, 1),
            unit=f"episode {at % 3}",
            weight=random.choice([0.5, 1.0]),
            old=near(count),
            reference=near(count),
        )
        for at, count in enumerate(counts)
    ]


def check_loss(
    model: Any, calls: Sequence[CallTokens], spec: LossSpec, random: Random, gather: Gather
) -> None:
    scored_calls = scored(calls, random)
    tokens = TrainedTokens.of(
        scored_calls,
        shares_of(scored_calls, spec),
        dtype=torch.float64,
        old_log_prob=flat([call.old for call in scored_calls]),
        reference_log_prob=flat([call.reference for call in scored_calls]),
    )
    alone = torch.cat([torch.zeros(0), *(naive(model, call) for call in calls)])
    plan = Plan.of(build_forest(calls))
    merged = gather(plan, edge_log_probs(model, plan, random.choice(ON_CPU)))
    expected, actual = (step_loss(part.double(), tokens, spec).loss for part in (alone, merged))
    torch.testing.assert_close(actual, expected, **CLOSE)
    torch.testing.assert_close(gradient_of(model, actual), gradient_of(model, expected), **CLOSE)


def property_of(model: str, loss: str, gather: Gather) -> Callable[[], None]:
    # A counterexample need not be small to fail.
    @settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
    @example(calls=GOLDEN, mode="token-mean", unit="call", bypass=True, seed=0)
    @given(
        calls=call_sets(),
        mode=st.sampled_from(AGGREGATIONS),
        unit=st.sampled_from(UNITS),
        bypass=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def holds(calls: list[CallTokens], mode: str, unit: str, bypass: bool, seed: int) -> None:
        spec = spec_of(
            loss, loss_agg_mode=mode, loss_unit=unit, bypass_mode=bypass, kl_loss_coef=0.1
        )
        check_loss(model_of(model), calls, spec, Random(seed), gather)

    return holds


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("model", MODELS)
def test_a_forest_gives_every_loss_the_value_and_gradient_of_its_calls_alone(
    model: str, loss: str
) -> None:
    property_of(model, loss, Plan.flat)()


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("model", MODELS)
def test_training_only_the_first_call_of_a_shared_token_fails_the_same_test(
    model: str, loss: str
) -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        property_of(model, loss, keep_first)()
