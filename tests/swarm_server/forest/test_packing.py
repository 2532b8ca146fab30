from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.forest.call_sets import call_sets

from fakevllm_server.forest import CallTokens, Piece, build_forest, pack

budgets = st.integers(1, 30)


def siblings(prompt: list[int], num: int, length: int, first: int) -> list[CallTokens]:
    return [CallTokens.of(prompt, [first + index] * length) for index in range(num)]


def sizes(pieces: list[Piece]) -> list[int]:
    return [piece.forest.num_nodes for piece in pieces]


@given(call_sets(), budgets)
def test_every_call_is_in_exactly_one_piece(calls: list[CallTokens], max_tokens: int) -> None:
    pieces = pack(calls, max_tokens)
    packed = sorted(index for piece in pieces for index in piece.calls)
    assert packed == list(range(len(calls)))
    for piece in pieces:
        for position, index in enumerate(piece.calls):
            ids = [piece.forest.ids[node] for node in piece.forest.row(position)]
            assert ids == list(calls[index].ids)


@given(call_sets(), budgets)
def test_a_piece_exceeds_the_budget_only_for_a_single_long_call(
    calls: list[CallTokens], max_tokens: int
) -> None:
    for piece in pack(calls, max_tokens):
        longest = max(len(calls[index].ids) for index in piece.calls)
        assert piece.forest.num_nodes <= max(max_tokens, longest)


@given(call_sets(), budgets, st.lists(st.integers(0, 2), min_size=100, max_size=100))
def test_groups_change_neither_budget_nor_calls(
    calls: list[CallTokens], max_tokens: int, groups: list[int]
) -> None:
    pieces = pack(calls, max_tokens, groups[: len(calls)])
    assert sorted(index for piece in pieces for index in piece.calls) == list(range(len(calls)))
    for piece in pieces:
        longest = max(len(calls[index].ids) for index in piece.calls)
        assert piece.forest.num_nodes <= max(max_tokens, longest)


@given(call_sets(), budgets)
def test_pieces_are_never_larger_than_calls_without_sharing(
    calls: list[CallTokens], max_tokens: int
) -> None:
    assert sum(sizes(pack(calls, max_tokens))) <= build_forest(calls).num_naive


@given(call_sets(), budgets)
def test_the_same_calls_are_packed_the_same_way(calls: list[CallTokens], max_tokens: int) -> None:
    first, second = pack(calls, max_tokens), pack(calls, max_tokens)
    assert [piece.calls for piece in first] == [piece.calls for piece in second]


@given(call_sets())
def test_calls_that_fit_are_one_piece(calls: list[CallTokens]) -> None:
    num_nodes = build_forest(calls).num_nodes
    assert len(pack(calls, max(num_nodes, 1))) == (1 if calls else 0)


@pytest.mark.parametrize("max_tokens", [50, 65, 80, 95])
def test_a_tree_is_cut_at_its_topmost_branch(max_tokens: int) -> None:
    """Two questions of 16 tokens share a system prompt of 4 tokens. The budget exceeds one tree,
    and is too small for both."""
    calls = siblings([9] * 4 + [1] * 16, 3, 10, 100) + siblings([9] * 4 + [2] * 16, 3, 10, 200)
    pieces = pack(calls, max_tokens)
    assert [piece.calls for piece in pieces] == [[0, 1, 2], [3, 4, 5]]
    assert sizes(pieces) == [50, 50]


def test_a_group_beyond_the_budget_pays_its_prompt_once_a_piece() -> None:
    pieces = pack(siblings([1] * 100, 8, 10, 100), 145)
    assert sizes(pieces) == [140, 140]


def test_whole_trees_fill_pieces_first_fit_decreasing() -> None:
    trees = [CallTokens.of([first] * (size - 1), [0]) for first, size in enumerate([6, 6, 4, 4])]
    pieces = pack(trees, 10)
    assert sizes(pieces) == [10, 10]


def test_a_group_under_two_roots_stays_whole() -> None:
    calls = [
        CallTokens.of([1] * 9, [2], "base"),
        CallTokens.of([3] * 9, [4], "base"),
        CallTokens.of([5] * 9, [6], "base"),
        CallTokens.of([7] * 9, [8], "adapter"),
    ]
    pieces = pack(calls, 20, ["a", "b", "b", "c"])
    assert [1, 2] in [piece.calls for piece in pieces]


def test_a_call_beyond_the_budget_goes_with_those_it_holds() -> None:
    calls = [CallTokens.of([1] * 20, []), CallTokens.of([1] * 30, [2]), CallTokens.of([3], [4])]
    assert [piece.calls for piece in pack(calls, 10)] == [[0, 1], [2]]


def test_a_budget_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        pack([CallTokens.of([1], [2])], 0)


@settings(max_examples=30)
@given(call_sets(max_calls=3), st.integers(18, 24))
def test_no_cut_of_the_same_order_is_cheaper(calls: list[CallTokens], max_tokens: int) -> None:
    """Compare with the cheapest of all possible cuts. Every call fits the budget."""
    order = dfs_order(calls)
    cheapest = [0]
    for end in range(1, len(order) + 1):
        runs = {begin: build_forest([calls[at] for at in order[begin:end]]) for begin in range(end)}
        cheapest.append(
            min(
                cheapest[begin] + run.num_nodes
                for begin, run in runs.items()
                if run.num_nodes <= max_tokens
            )
        )
    assert sum(sizes(pack(calls, max_tokens))) <= cheapest[-1]


def dfs_order(calls: list[CallTokens]) -> list[int]:
    forest = build_forest(calls)
    ends = [path[-1][1] - 1 if path else -1 for path in forest.paths]
    touts = [forest.tout[end] if end >= 0 else 0 for end in ends]
    return sorted(range(len(calls)), key=lambda call: (touts[call], -ends[call], call))


def test_a_large_batch_is_packed_close_to_its_forest() -> None:
    rng = random.Random(0)

    def random_ids(length: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(length)]

    system = random_ids(200)
    calls = [
        CallTokens.of(prompt, random_ids(rng.randrange(5, 60)))
        for prompt in ([*system, *random_ids(100)] for _ in range(20))
        for _ in range(8)
    ]
    pieces = pack(calls, 2048)
    assert max(sizes(pieces)) <= 2048
    assert sum(sizes(pieces)) <= 1.25 * build_forest(calls).num_nodes
