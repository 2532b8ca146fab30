"""Every attention gives each call the log-probabilities and gradients of the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from swarm_server.backends.torch_forest.tiny_models import (
    MODELS,
    build_model,
    coupled_loss,
    gradient_of,
    naive,
)
from swarm_server.forest.call_sets import GOLDEN, call_sets
from torch import Tensor

from fakevllm_server.backends.torch_forest.attention.registry import ATTENTIONS
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_log_probs, edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.forest import CallTokens, build_forest

DIFFERENTIABLE = sorted(ATTENTIONS.keys() - {"flex"})
"""The methods with a backward pass on a CPU."""
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-9}


@cache
def model_of(name: str) -> Any:
    return build_model(MODELS[name])


def per_call(model: Any, calls: Sequence[CallTokens], attention: str) -> Sequence[Tensor]:
    plan = Plan.of(build_forest(calls))
    return plan.per_call(edge_log_probs(model, plan, attention))


def check_equal(model: Any, calls: Sequence[CallTokens], attention: str) -> None:
    alone = [naive(model, call) for call in calls]
    merged = per_call(model, calls, attention)
    for expected, actual in zip(alone, merged, strict=True):
        torch.testing.assert_close(actual, expected, check_dtype=len(expected) > 0, **CLOSE)
    expected_gradient = gradient_of(model, coupled_loss(alone))
    actual_gradient = gradient_of(model, coupled_loss([values.double() for values in merged]))
    torch.testing.assert_close(actual_gradient, expected_gradient, **CLOSE)


@pytest.mark.parametrize("attention", DIFFERENTIABLE)
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(calls=call_sets())
def test_a_forest_has_the_log_probs_and_gradients_of_its_calls_alone(
    name: str, attention: str, calls: list[CallTokens]
) -> None:
    check_equal(model_of(name), calls, attention)


@pytest.mark.parametrize("attention", DIFFERENTIABLE)
def test_duplicates_empty_responses_and_prompts_of_one_token_are_exact(
    attention: str,
) -> None:
    calls = [
        CallTokens.of([1], [2, 3]),
        CallTokens.of([1], [2, 3]),
        CallTokens.of([1], []),
        CallTokens.of([1], [4]),
        CallTokens.of([1, 2, 3, 5], [6], temperature=0.7),
        CallTokens.of([1, 2, 3, 5], [6], temperature=1.3),
        CallTokens.of([9, 9, 9], [9]),
    ]
    check_equal(model_of("llama"), calls, attention)


@pytest.mark.parametrize("attention", DIFFERENTIABLE)
def test_a_session_whose_siblings_differ_in_length_is_exact(attention: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def random_ids(number: int) -> list[int]:
        return torch.randint(0, 11, (number,), generator=generator).tolist()

    prompt, calls = random_ids(20), []
    for turn in range(3):
        answers = [random_ids(length) for length in (9, 40, 3, 41, 44 + turn, 9)]
        calls += [CallTokens.of(prompt, answer) for answer in answers]
        prompt = [*prompt, *answers[turn], *random_ids(4)]
    check_equal(model_of("qwen3" if attention == "segments" else "llama"), calls, attention)


def test_training_only_the_first_call_of_a_shared_token_is_detected() -> None:
    """This shows that the comparison above detects the mistake."""
    model = model_of("llama")
    plan = Plan.of(build_forest(GOLDEN))
    edge_log_prob = edge_log_probs(model, plan, "chains")
    trained: set[int] = set()
    kept: list[Tensor] = []
    for call_edges in plan.gather.split(list(plan.num_trained)):
        first = [edge for edge in call_edges.tolist() if edge not in trained]
        trained.update(first)
        kept.append(edge_log_prob[first])
    expected = gradient_of(model, coupled_loss([naive(model, call) for call in GOLDEN]))
    wrong = gradient_of(model, coupled_loss(kept))
    assert (wrong - expected).norm() > 0.05 * expected.norm()


def test_entropies_are_those_of_the_distributions_sampled_from() -> None:
    model = model_of("qwen2")
    calls = [*GOLDEN, CallTokens.of([1, 2, 3], [4, 5], temperature=0.5)]
    plan = Plan.of(build_forest(calls))
    values = edge_values(model, plan, "chains", with_entropy=True)
    assert values.entropy is not None
    for call, actual in zip(calls, plan.per_call(values.entropy), strict=True):
        (start, end), ids = call.trained[0], torch.tensor([list(call.ids)])
        log_probs = (model(ids).logits[0] / call.temperature).log_softmax(-1)[start - 1 : end - 1]
        torch.testing.assert_close(actual, -(log_probs.exp() * log_probs).sum(-1), **CLOSE)


@pytest.mark.parametrize("max_logits", [1, 25, 40, 10_000])
def test_a_bound_on_the_logits_changes_nothing(max_logits: int) -> None:
    model = model_of("llama")
    plan = Plan.of(build_forest([*GOLDEN, CallTokens.of([1, 2, 3], [4, 5], temperature=0.5)]))
    whole = edge_values(model, plan, "chains", with_entropy=True)
    parts = edge_values(model, plan, "chains", with_entropy=True, max_logits=max_logits)
    assert whole.entropy is not None and parts.entropy is not None
    torch.testing.assert_close(parts.log_prob, whole.log_prob, **CLOSE)
    torch.testing.assert_close(parts.entropy, whole.entropy, **CLOSE)
    expected = gradient_of(model, (whole.log_prob.exp() + 0.3 * whole.entropy).sum())
    actual = gradient_of(model, (parts.log_prob.exp() + 0.3 * parts.entropy).sum())
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_the_lm_head_computes_at_most_a_chunk_of_logits_at_a_time() -> None:
    model = model_of("llama")
    sizes: list[int] = []
    handle = model.lm_head.register_forward_hook(
        lambda module, inputs, output: sizes.append(output.numel())
    )
    plan = Plan.of(build_forest(GOLDEN))
    edge_log_probs(model, plan, "chains", max_logits=25).sum().backward()
    handle.remove()
    model.zero_grad()
    assert max(sizes) <= 25 and sum(sizes) >= 11 * len(plan.head_node)


@pytest.mark.parametrize("attention", DIFFERENTIABLE)
def test_checkpointed_layers_are_recomputed_with_the_same_attention(attention: str) -> None:
    model = build_model(MODELS["qwen3"])
    plan = Plan.of(build_forest(GOLDEN))
    expected = gradient_of(model, edge_log_probs(model, plan, attention).exp().sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    actual = gradient_of(model, edge_log_probs(model, plan, attention).exp().sum())
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("attention", DIFFERENTIABLE)
def test_a_piece_without_trained_tokens_costs_no_pass(attention: str) -> None:
    for calls in ([], [CallTokens.of([1, 2], [])]):
        plan = Plan.of(build_forest(calls))
        values = edge_values(None, plan, attention, with_entropy=True)
        assert len(values.log_prob) == 0
        assert [len(values) for values in plan.per_call(values.log_prob)] == [0] * len(calls)
