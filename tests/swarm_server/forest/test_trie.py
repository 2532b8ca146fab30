from __future__ import annotations

import doctest
import math
from itertools import pairwise

import pytest
from hypothesis import given
from swarm_server.forest.call_sets import GOLDEN, call_sets

from fakevllm_server.forest import CallTokens, Forest, build_forest, packing, trie


def prefixes(call: CallTokens) -> list[tuple[object, tuple[int, ...]]]:
    return [(call.root, tuple(call.ids[: at + 1])) for at in range(len(call.ids))]


def ids_from_root(forest: Forest, node: int) -> list[int]:
    ids: list[int] = []
    while node >= 0:
        ids.append(forest.ids[node])
        node = forest.parent[node]
    return ids[::-1]


def is_ancestor_or_self(forest: Forest, above: int, node: int) -> bool:
    while node > above:
        node = forest.parent[node]
    return node == above


def test_the_golden_trie() -> None:
    forest = build_forest(GOLDEN)
    assert list(forest.ids) == [1, 2, 3, 4, 5, 9, 8, 6, 7]
    assert list(forest.pos) == [0, 1, 2, 3, 4, 5, 6, 4, 3]
    assert list(forest.tin) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert list(forest.tout) == [9, 9, 9, 8, 7, 7, 7, 8, 9]
    assert list(forest.parent) == [-1, 0, 1, 2, 3, 4, 5, 3, 2]
    assert [list(forest.row(call)) for call in range(4)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 7],
        [0, 1, 2, 8],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    assert (forest.num_naive, forest.num_nodes, forest.rho) == (21, 9, 21 / 9)


def test_the_golden_segments() -> None:
    segments = [
        (segment.start, segment.end, segment.depth, segment.parent, segment.children, segment.path)
        for segment in build_forest(GOLDEN).segments
    ]
    assert segments == [
        (0, 3, 0, -1, (1, 4), ((0, 3),)),
        (3, 4, 3, 0, (2, 3), ((0, 4),)),
        (4, 7, 4, 1, (), ((0, 7),)),
        (7, 8, 4, 1, (), ((0, 4), (7, 8))),
        (8, 9, 3, 0, (), ((0, 3), (8, 9))),
    ]


@given(call_sets())
def test_rows_give_the_ids_of_the_calls(calls: list[CallTokens]) -> None:
    forest = build_forest(calls)
    for index, call in enumerate(calls):
        row = list(forest.row(index))
        assert [forest.ids[node] for node in row] == list(call.ids)
        assert [forest.pos[node] for node in row] == list(range(len(call.ids)))
        assert [forest.parent[node] for node in row] == [-1, *row[:-1]][: len(row)]


@given(call_sets())
def test_there_is_one_node_for_each_distinct_prefix(calls: list[CallTokens]) -> None:
    forest = build_forest(calls)
    distinct = {prefix for call in calls for prefix in prefixes(call)}
    assert forest.num_nodes == len(distinct)
    assert forest.num_naive == sum(len(call.ids) for call in calls)


@given(call_sets())
def test_visible_keys_are_exactly_the_ancestors(calls: list[CallTokens]) -> None:
    forest = build_forest(calls)
    for query in range(forest.num_nodes):
        for key in range(forest.num_nodes):
            inside = key <= query < forest.tout[key]
            assert inside == is_ancestor_or_self(forest, key, query)


@given(call_sets())
def test_the_order_of_calls_changes_no_tree(calls: list[CallTokens]) -> None:
    for root in ("base", "adapter"):
        same_root = [call for call in calls if call.root == root]
        forest, reverse = build_forest(same_root), build_forest(same_root[::-1])
        assert (forest.ids, forest.tout, forest.parent) == (
            reverse.ids,
            reverse.tout,
            reverse.parent,
        )
        assert forest.segments == reverse.segments
        assert forest.paths == reverse.paths[::-1]


@given(call_sets())
def test_segments_are_runs_without_a_branch_in_preorder(calls: list[CallTokens]) -> None:
    forest = build_forest(calls)
    covered: list[int] = []
    for index, segment in enumerate(forest.segments):
        nodes = range(segment.start, segment.end)
        covered.extend(nodes)
        assert len(nodes) > 0 and len(segment.children) != 1
        assert {forest.tout[node] for node in nodes} == {segment.tout}
        assert forest.pos[segment.start] == segment.depth
        assert all(forest.segments[child].parent == index for child in segment.children)
        above = forest.segments[segment.parent].end - 1 if segment.parent >= 0 else -1
        assert forest.parent[segment.start] == above
    assert covered == list(range(forest.num_nodes))


@given(call_sets())
def test_a_segment_sees_its_path_in_few_slices(calls: list[CallTokens]) -> None:
    forest = build_forest(calls)
    for segment in forest.segments:
        path = [node for start, end in segment.path for node in range(start, end)]
        last = segment.end - 1
        assert [forest.ids[node] for node in path] == ids_from_root(forest, last)
        assert path == sorted(path) and path[-1] == last
        assert all(before[1] < after[0] for before, after in pairwise(segment.path))
        assert len(segment.path) <= 1 + math.log2(forest.num_nodes)


def test_different_roots_share_no_node() -> None:
    forest = build_forest(
        [CallTokens.of([1, 2], [3], "base"), CallTokens.of([1, 2], [3], "adapter")]
    )
    assert forest.num_nodes == 6
    assert not set(forest.row(0)) & set(forest.row(1))


def test_different_temperatures_share_nodes_and_not_edges() -> None:
    forest = build_forest(
        [CallTokens.of([1, 2], [3], temperature=1.0), CallTokens.of([1, 2], [3], temperature=0.5)]
    )
    assert forest.num_nodes == 3
    assert list(forest.edges.head_node) == [1, 1]
    assert list(forest.edges.head_temperature) == [0.5, 1.0]
    assert [list(edges) for edges in forest.edges.per_call] == [[1], [0]]


def test_no_calls_make_an_empty_forest() -> None:
    forest = build_forest([])
    assert (forest.num_nodes, forest.rho, forest.edges.num_heads) == (0, 1.0, 0)


def test_a_call_without_tokens_has_no_nodes() -> None:
    forest = build_forest([CallTokens([], []), CallTokens.of([1], [2])])
    assert [list(forest.row(call)) for call in range(2)] == [[], [0, 1]]


def test_a_path_of_many_branches_needs_no_recursion() -> None:
    """Each call branches off the longest call one token later than the call before it."""
    depth = 1100
    calls = [CallTokens.of([0] * length, [1]) for length in range(1, depth)]
    forest = build_forest(calls)
    assert forest.num_nodes == 2 * (depth - 1)
    assert max(forest.pos) == depth - 1
    assert list(forest.row(depth - 2)) == [*range(depth - 1), forest.row(depth - 2)[-1]]


def test_a_call_of_200000_tokens_needs_no_recursion() -> None:
    ids = [at % 7 for at in range(200_000)]
    forest = build_forest([CallTokens.of(ids, [8]), CallTokens.of(ids[:100_000], [9])])
    assert forest.num_nodes == 200_002
    assert forest.segments[0].end == 100_000
    assert forest.edges.num_edges == 2


@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(2, 2)], [(1, 4)], [(2, 3), (1, 2)], [(1, 3), (2, 3)]]
)
def test_invalid_spans_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="cannot train on"):
        CallTokens([1, 2, 3], spans)


def test_a_response_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot train on"):
        CallTokens.of([], [1])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_gives_no_distribution_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        CallTokens.of([1], [2], temperature=temperature)


@pytest.mark.parametrize("module", [trie, packing])
def test_the_examples_in_docstrings_hold(module: object) -> None:
    tested = doctest.testmod(module)  # type: ignore[arg-type]
    assert tested.attempted > 0 and tested.failed == 0
