from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from backends.torch_forest.tiny_models import MODELS, made
from forest.call_sets import call_sets
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fakevllm_server.backends.torch_forest.dense import DenseLayout
from fakevllm_server.backends.torch_forest.flex import block_mask
from fakevllm_server.backends.torch_forest.forward import edge_log_probs
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.forest import CallTokens, plant

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SIZE = 4


@cache
def model_of(name: str) -> Any:
    return made(MODELS[name])


def as_dense(mask: BlockMask, num_nodes: int) -> Tensor:
    """What a kernel makes of it: [nodes, nodes] of bool."""
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    node = torch.arange(num_nodes)
    mask_mod: Any = mask.mask_mod
    exact = mask_mod(torch.tensor(0), torch.tensor(0), node[:, None], node[None, :])
    for number, which, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        assert number is not None and which is not None
        for query, count in enumerate(number[0, 0].tolist()):
            for key in which[0, 0, query, :count].tolist():
                at = (slice(query * SIZE, (query + 1) * SIZE), slice(key * SIZE, (key + 1) * SIZE))
                assert not dense[at].any(), "a block is in one of the lists"
                dense[at] = True if whole else exact[at]
    return dense


@pytest.mark.parametrize("window", [None, 1, 3])
@settings(max_examples=60)
@given(calls=call_sets(max_calls=8))
def test_a_block_mask_is_the_mask_of_all_pairs(window: int | None, calls: list[CallTokens]) -> None:
    plan = Plan.of(plant(calls))
    num_nodes = len(plan.ids)
    added = torch.arange(num_nodes, num_nodes + -num_nodes % SIZE)
    tout = torch.cat([torch.tensor(list(plan.forest.tout), dtype=torch.long), added + 1])
    pos = torch.cat([plan.pos, torch.zeros_like(added)])
    found = as_dense(block_mask(tout, pos, window, SIZE), len(tout))
    assert torch.equal(found[:num_nodes, :num_nodes], DenseLayout(plan).visible(window))
    assert torch.equal(found[num_nodes:, num_nodes:], torch.eye(len(added), dtype=torch.bool))
    assert not found[:num_nodes, num_nodes:].any() and not found[num_nodes:, :num_nodes].any()


def test_blocks_nobody_sees_are_not_visited() -> None:
    calls = [CallTokens.of([1, 2, 3, 4], [first, *[0] * 7]) for first in range(5, 11)]
    plan = Plan.of(plant(calls))
    mask = block_mask(torch.tensor(list(plan.forest.tout)), plan.pos, None, SIZE)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2] + [1, 2] * 5
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 13


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4)
@given(calls=call_sets())
def test_its_log_probs_are_those_of_the_dense_mask(name: str, calls: list[CallTokens]) -> None:
    model = model_of(name)
    plan = Plan.of(plant(calls))
    with torch.no_grad():
        found, expected = (edge_log_probs(model, plan, way) for way in ("flex", "dense"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_its_gradients_are_those_of_the_dense_mask() -> None:
    """FlexAttention has no backward on a CPU."""
    model = MODELS["llama"]().cuda()
    plan = Plan.of(plant([CallTokens.of([1] * 90, [2] * 60), CallTokens.of([1] * 90, [3])]), "cuda")
    gradients = []
    for way in ("flex", "dense"):
        edge_log_probs(model, plan, way).sum().backward()
        gradients.append(model.lm_head.weight.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
