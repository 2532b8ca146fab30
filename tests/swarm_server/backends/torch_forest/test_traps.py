"""Methods to pass a tree through transformers that look right, raise nothing and are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from swarm_server.backends.torch_forest.tiny_models import (
    MODELS,
    SIZES,
    VOCAB,
    build_model,
    llama,
    naive,
)
from swarm_server.forest.call_sets import GOLDEN
from torch import Tensor
from transformers import (
    AttentionInterface,
    BloomConfig,
    BloomForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from fakevllm_server.backends.torch_forest.attention.dense import DenseLayout
from fakevllm_server.backends.torch_forest.attention.transformers_hook import (
    forest_attention,
    install_attention,
)
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_log_probs
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.supported_models import sharing_refusal
from fakevllm_server.forest import CallTokens, build_forest

LONGER = [CallTokens.of([1, 2, 3, 4, 5, 6, 7, 8], [9, 10]), *GOLDEN]
"""Calls that are longer than the models' windows."""
MERGING = ("chains", "segments", "dense")


def alone(model: Any, calls: Sequence[CallTokens] = LONGER) -> Tensor:
    return torch.cat([naive(model, call) for call in calls]).detach()


def forward_tree(
    model: Any, calls: Sequence[CallTokens] = LONGER, **arguments: Any
) -> tuple[Plan, Tensor]:
    """Pass the tree through the model's own forward pass with these arguments."""
    plan = Plan.of(build_forest(calls))
    logits = model(input_ids=plan.ids[None], use_cache=False, **arguments).logits[0]
    edges = logits[plan.head_node].log_softmax(-1)[plan.edge_head, plan.edge_token]
    return plan, plan.flat(edges).detach()


def max_difference(actual: Tensor, expected: Tensor) -> float:
    return (actual - expected).abs().max().item()


def all_methods_are_exact(model: Any, calls: Sequence[CallTokens] = LONGER) -> bool:
    plan, expected = Plan.of(build_forest(calls)), alone(model, calls)
    results = [plan.flat(edge_log_probs(model, plan, name)).detach() for name in MERGING]
    return all(max_difference(result, expected) < 1e-9 for result in results)


def visible(plan: Plan) -> Tensor:
    return DenseLayout(plan).visible(None)[None, None]


def test_positions_without_a_mask_are_taken_for_packed_sequences() -> None:
    model = build_model(llama)
    plan = Plan.of(build_forest(LONGER))
    _, wrong = forward_tree(model, position_ids=plan.pos[None])
    assert max_difference(wrong, alone(model)) > 1e-2
    assert all_methods_are_exact(model)


def test_a_mask_without_positions_counts_the_nodes() -> None:
    model = build_model(llama)
    plan = Plan.of(build_forest(LONGER))
    _, wrong = forward_tree(model, attention_mask=visible(plan))
    _, right = forward_tree(model, attention_mask=visible(plan), position_ids=plan.pos[None])
    assert max_difference(wrong, alone(model)) > 1e-2
    assert max_difference(right, alone(model)) < 1e-9
    assert all_methods_are_exact(model)


def test_eager_attention_adds_a_boolean_mask() -> None:
    model = build_model(llama)
    model.set_attn_implementation("eager")
    plan = Plan.of(build_forest(LONGER))
    # The mask adds 1 to visible pairs, and 0 to hidden pairs.
    _, wrong = forward_tree(model, attention_mask=visible(plan), position_ids=plan.pos[None])
    assert max_difference(wrong, alone(model)) > 1e-2
    # The forest replaces the model's attention; eager attention rounds to float32.
    actual = plan.flat(edge_log_probs(model, plan, "chains"))
    assert max_difference(actual, alone(build_model(llama))) < 1e-9


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_one_mask_for_all_layers_loses_their_windows(name: str) -> None:
    model = build_model(MODELS[name])
    plan = Plan.of(build_forest(LONGER))
    _, wrong = forward_tree(model, attention_mask=visible(plan), position_ids=plan.pos[None])
    assert max_difference(wrong, alone(model)) > 1e-2
    assert all_methods_are_exact(model)


def test_an_attention_without_a_mask_function_attends_to_padding() -> None:
    """The test covers passes without a forest, such as those of a batch padded on the left."""
    model = build_model(llama)
    ids = torch.tensor([[0, 0, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    AttentionInterface.register("no_mask_function", forest_attention)
    model.set_attn_implementation("no_mask_function")
    wrong = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    install_attention(model)
    actual = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert max_difference(wrong[:, 2:], expected[:, 2:]) > 1e-2
    assert max_difference(actual[:, 2:], expected[:, 2:]) < 1e-12


def linear_attention() -> Any:
    sizes: dict[str, Any] = {
        "head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "mlp_only_layers": [0, 1],
        "layer_types": ["linear_attention", "full_attention"],
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **sizes))


def dynamic_positions() -> Any:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    return llama(rope_parameters=rope, max_position_embeddings=4)


def alibi() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (linear_attention, "models of type qwen3_next"),
        (dynamic_positions, "positions of type dynamic"),
        (alibi, "models of type bloom"),
    ],
)
def test_models_that_cannot_share_prefixes_are_refused(
    make: Callable[[], Any], message: str
) -> None:
    assert message in (sharing_refusal(make().eval()) or "")


@pytest.mark.parametrize("make", [linear_attention, dynamic_positions])
def test_refused_models_would_be_silently_wrong(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    plan = Plan.of(build_forest(LONGER))
    actual = plan.flat(edge_log_probs(model, plan, "dense")).detach()
    rows = plan.flat(edge_log_probs(model, plan, "rows")).detach()
    assert max_difference(actual, alone(model).float()) > 1e-4
    if make is linear_attention:
        assert max_difference(rows, alone(model).float()) < 1e-5, (
            "rows, which share nothing, are correct"
        )


def test_the_norms_of_transformers_round_float64() -> None:
    """For this reason a gradient of a float64 model agrees only to 1e-7, and the tests use norm
    layers of their own."""
    torch.manual_seed(0)
    model = llama().double().eval()
    plan = Plan.of(build_forest(LONGER))
    expected = torch.autograd.grad(
        torch.cat([naive(model, call) for call in LONGER]).sum(), model.lm_head.weight
    )[0]
    merged = plan.flat(edge_log_probs(model, plan, "chains")).sum()
    actual = torch.autograd.grad(merged, model.lm_head.weight)[0]
    assert max_difference(actual, expected) < 1e-5
