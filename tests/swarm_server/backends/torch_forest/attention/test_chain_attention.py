from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from swarm_server.forest.call_sets import GOLDEN, call_sets

from fakevllm_server.backends.torch_forest.attention.chain_attention import (
    ChainLayout,
    CrossBlock,
    find_chains,
)
from fakevllm_server.backends.torch_forest.attention.dense import DenseLayout
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.forest import CallTokens, build_forest


def test_the_golden_trie_is_a_chain_and_two_leaves() -> None:
    chains, cross_blocks = find_chains(build_forest(GOLDEN))
    assert sorted(chains) == [(0, 7), (7, 8), (8, 9)]
    assert sorted(cross_blocks, key=lambda cross: cross.first_query) == [
        CrossBlock(7, 8, 0, 4),
        CrossBlock(8, 9, 0, 3),
    ]


@given(calls=call_sets(max_calls=8))
def test_every_visible_pair_is_computed_exactly_once(calls: list[CallTokens]) -> None:
    plan = Plan.of(build_forest(calls))
    chains, cross_blocks = find_chains(plan.forest)
    num_nodes = len(plan.ids)
    count = torch.zeros(num_nodes, num_nodes, dtype=torch.long)
    for start, end in chains:
        count[start:end, start:end] += torch.ones(end - start, end - start).tril().long()
    for cross in cross_blocks:
        count[cross.first_query : cross.last_query, cross.first_key : cross.last_key] += 1
    assert torch.equal(count, DenseLayout(plan).visible(None).long())


@given(calls=call_sets(max_calls=8))
def test_every_node_is_in_one_batch(calls: list[CallTokens]) -> None:
    plan = Plan.of(build_forest(calls))
    nodes: list[int] = []
    for batch in ChainLayout(plan).chain_batches:
        real_nodes = batch.nodes if batch.is_real is None else batch.nodes[batch.is_real]
        nodes += real_nodes.flatten().tolist()
        if batch.first_node is not None:
            assert batch.nodes.flatten().tolist() == list(
                range(batch.first_node, batch.first_node + batch.nodes.numel())
            )
    assert sorted(nodes) == list(range(len(plan.ids)))


def test_a_forest_without_branches_has_only_causal_chains() -> None:
    calls = [CallTokens.of([1] * number, [2]) for number in range(40, 44)]
    separate = [CallTokens(call.ids, call.trained, root) for root, call in enumerate(calls)]
    chains, cross_blocks = find_chains(build_forest(separate))
    assert len(chains) == 4 and not cross_blocks


@pytest.mark.parametrize("num_turns", [1, 8, 3000])
def test_a_long_conversation_is_one_chain_whatever_its_siblings(num_turns: int) -> None:
    calls: list[CallTokens] = []
    history = [9]
    for turn in range(num_turns):
        calls.append(CallTokens.of(history, [turn % 7, 7]))
        history = [*history, turn % 7, 8]
    calls.append(CallTokens.of(history, [7]))
    chains, cross_blocks = find_chains(build_forest(calls[-200:]))
    max_cross_blocks = max(
        sum(cross.first_query <= node < cross.last_query for cross in cross_blocks)
        for node, _ in chains
    )
    assert max(end - start for start, end in chains) == len(history) + 1
    assert max_cross_blocks <= 1 + math.log2(sum(end - start for start, end in chains))
