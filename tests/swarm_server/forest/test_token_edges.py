from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from swarm_server.forest.call_sets import GOLDEN, call_sets

from fakevllm_server.forest import CallTokens, Edges, Forest, build_forest


def positions(call: CallTokens) -> list[int]:
    return [at for start, end in call.trained for at in range(start, end)]


def allowed_set(edges: Edges, head: int) -> bytes | None:
    index = edges.head_set[head]
    return edges.sets[index] if index >= 0 else None


def coefficients(forest: Forest, terms: list[list[float]]) -> list[float]:
    """Return the sum of the calls' terms at each node, which is the gradient of the gather."""
    by_node: dict[int, float] = defaultdict(float)
    for edges, call_terms in zip(forest.edges.per_call, terms, strict=True):
        for edge, term in zip(edges, call_terms, strict=True):
            by_node[forest.edges.edge_node[edge]] += term
    return [by_node[node] for node in range(forest.num_nodes)]


def test_the_golden_edges() -> None:
    edges = build_forest(GOLDEN).edges
    assert list(edges.head_node) == [2, 3, 5]
    assert list(edges.head_start) == [0, 2, 4, 5]
    assert list(edges.edge_head) == [0, 0, 1, 1, 2]
    assert list(edges.edge_token) == [4, 7, 5, 6, 8]
    assert list(edges.edge_node) == [3, 8, 4, 7, 6]
    assert [list(call_edges) for call_edges in edges.per_call] == [[0, 2], [0, 3], [1], [4]]


@given(call_sets())
def test_every_trained_position_has_its_edge(calls: list[CallTokens]) -> None:
    forest = build_forest(calls)
    edges = forest.edges
    for index, call in enumerate(calls):
        row = forest.row(index)
        gathered = edges.per_call[index]
        assert len(gathered) == len(positions(call))
        for at, edge in zip(positions(call), gathered, strict=True):
            head = edges.edge_head[edge]
            assert edges.edge_node[edge] == row[at]
            assert edges.edge_token[edge] == call.ids[at]
            assert edges.head_node[head] == row[at - 1]
            assert edges.head_temperature[head] == call.temperature
            assert allowed_set(edges, head) == (
                call.allowed_sets[at] if call.allowed_sets else None
            )


@given(call_sets())
def test_edges_and_heads_are_unique_and_used(calls: list[CallTokens]) -> None:
    edges = build_forest(calls).edges
    kinds = [(edges.head_temperature[head], edges.head_set[head]) for head in edges.edge_head]
    assert len(set(zip(kinds, edges.edge_node, strict=True))) == edges.num_edges
    sets = [allowed_set(edges, head) or b"" for head in range(edges.num_heads)]
    heads = list(zip(edges.head_temperature, sets, edges.head_node, strict=True))
    assert heads == sorted(set(heads))
    assert len(set(edges.sets)) == len(edges.sets) == len(set(filter(None, sets)))
    assert {edge for call_edges in edges.per_call for edge in call_edges} == set(
        range(edges.num_edges)
    )


@given(call_sets())
def test_the_edges_of_a_head_are_consecutive(calls: list[CallTokens]) -> None:
    edges = build_forest(calls).edges
    assert len(edges.head_start) == edges.num_heads + 1
    heads = [
        head
        for head in range(edges.num_heads)
        for _ in range(edges.head_start[head], edges.head_start[head + 1])
    ]
    assert heads == list(edges.edge_head)
    assert set(heads) == set(range(edges.num_heads))


ADVANTAGES = [1.0, -0.5, -0.5, 0.25]


def test_golden_coefficients_of_reinforce_by_token_mean() -> None:
    terms = [
        [-advantage / 6] * len(positions(call))
        for call, advantage in zip(GOLDEN, ADVANTAGES, strict=True)
    ]
    assert coefficients(build_forest(GOLDEN), terms) == pytest.approx(
        [0, 0, 0, -0.083333, -0.166667, 0, -0.041667, 0.083333, 0.083333], abs=1e-6
    )


def test_golden_coefficients_of_reinforce_by_sequence_mean() -> None:
    terms = [
        [-advantage / 4 / len(positions(call))] * len(positions(call))
        for call, advantage in zip(GOLDEN, ADVANTAGES, strict=True)
    ]
    assert coefficients(build_forest(GOLDEN), terms) == pytest.approx(
        [0, 0, 0, -0.0625, -0.125, 0, -0.0625, 0.0625, 0.125], abs=1e-6
    )


def test_golden_coefficients_of_a_clipped_loss_are_sums_of_terms() -> None:
    """Summing the advantages first would give 0 at the token that two siblings share."""
    ratio = 1.5
    terms = [
        [0.0 if advantage > 0 else -advantage * ratio / 6] * len(positions(call))
        for call, advantage in zip(GOLDEN, ADVANTAGES, strict=True)
    ]
    assert coefficients(build_forest(GOLDEN), terms) == pytest.approx(
        [0, 0, 0, 0.125, 0, 0, 0, 0.125, 0.125], abs=1e-6
    )


def test_a_sampled_token_that_returns_in_a_prompt_is_trained_once() -> None:
    first = CallTokens.of([1, 2], [3, 4])
    second = CallTokens.of([1, 2, 3, 4, 5], [6])
    forest = build_forest([first, second])
    assert forest.edges.num_edges == 3
    assert [len(call_edges) for call_edges in forest.edges.per_call] == [2, 1]


def test_identical_siblings_share_edges_and_keep_one_term_each() -> None:
    forest = build_forest([CallTokens.of([1], [2, 3])] * 2)
    assert forest.edges.num_edges == 2
    assert forest.edges.per_call[0] == forest.edges.per_call[1]
