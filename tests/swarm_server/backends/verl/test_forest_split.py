"""The division of a batch into pieces (sets of calls that go through the model together), among the
workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.backends.verl.batch_split import PADDING, num_tokens
from fakevllm_server.backends.verl.forest_split import PADDING_ROOT, WorkerRows
from fakevllm_server.forest import CallTokens, build_forest
from fakevllm_server.types.backend import BackendError, Call

Item = TypeVar("Item")


def batched(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


def call(prompt: list[int], response: list[int], weight: float = 1.0) -> Call:
    return Call("g", prompt, response, [-1.0] * len(response), 0, 1.0, 1.0, weight)


def siblings(number: int, num_prompt: int, num_response: int, first: int = 0) -> list[Call]:
    """Return calls that share a prompt. All tokens of all responses differ."""
    prompt = [first + at for at in range(num_prompt)]
    return [
        call(prompt, [first + 1000 * (at + 1) + token for token in range(num_response)])
        for at in range(number)
    ]


@st.composite
def call_trees(draw: st.DrawFn) -> list[Call]:
    """Draw calls that continue each other at random places."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    calls = [call([1], [2])]
    for _ in range(draw(st.integers(1, 25))):
        parent = rng.choice(calls)
        whole = [*parent.prompt_ids, *parent.response_ids]
        prompt = (
            whole[: rng.randrange(1, len(whole) + 1)] if rng.random() < 0.9 else [rng.randrange(5)]
        )
        response = [rng.randrange(5) for _ in range(rng.randrange(0, 30))]
        calls.append(call(prompt, response, weight=rng.choice([0.5, 1.0])))
    return calls


def pieces_of(split: WorkerRows) -> list[list[tuple[Call, int]]]:
    """Return the (row, root key) pairs of each piece."""
    assert split.forest is not None
    pairs = list(zip(split.rows, split.forest.roots, strict=True))
    return batched(pairs, split.forest.rows_per_piece)


def num_nodes(piece: list[tuple[Call, int]]) -> int:
    tokens = [
        CallTokens.of(row.prompt_ids, row.response_ids, root=root)
        for row, root in piece
        if root != PADDING_ROOT
    ]
    return build_forest(tokens).num_nodes


@given(call_trees(), st.integers(1, 5), st.integers(1, 120))
def test_each_call_is_in_one_row_and_all_workers_have_equally_many_pieces(
    calls: list[Call], num_workers: int, max_tokens: int
) -> None:
    split = WorkerRows.of(calls, num_workers, max_tokens, "chains")

    trained = [one for one in calls if one.response_ids]
    assert Counter(id(row) for row in split.rows if row is not PADDING) == Counter(map(id, trained))
    assert all(row.weight == 0 for row in split.rows if row is PADDING)
    assert len(split.rows) % num_workers == 0
    naive = sum(map(num_tokens, trained))
    assert split.metrics["tokens_computed"] + split.metrics["tokens_saved"] == naive
    if split.forest is None:
        assert split.metrics["tokens_saved"] == 0
        return
    pieces = pieces_of(split)
    assert len(pieces) % num_workers == 0
    limit = max_tokens + max(map(num_tokens, trained))
    sizes = [num_nodes(piece) for piece in pieces]
    assert max(sizes) <= limit
    assert sum(sizes) == split.metrics["tokens_computed"]
    of_worker = batched(sizes, len(pieces) // num_workers)
    for rounds in of_worker:
        assert all(first >= second for first, second in pairwise(rounds))
    for row, root in (pair for piece in pieces for pair in piece):
        assert (row is PADDING) == (root == PADDING_ROOT)


def test_workers_get_pieces_of_nearly_the_same_size() -> None:
    trees = [one for first in range(8) for one in siblings(4, 50, 10, first=100_000 * first)]

    split = WorkerRows.of(trees, 4, 100_000, "chains")

    assert [num_nodes(piece) for piece in pieces_of(split)] == [180] * 4
    assert split.metrics == {
        "tokens_computed": 720.0,
        "tokens_saved": 1200.0,
        "rho": pytest.approx(1920 / 720),
    }


def test_siblings_are_divided_if_a_repeated_prompt_takes_less_time_than_their_responses() -> None:
    long_responses = WorkerRows.of(siblings(8, 20, 50), 2, 100_000, "chains")
    assert [num_nodes(piece) for piece in pieces_of(long_responses)] == [220, 220]

    two_equal_calls = [call([1, 2, 3], [4, 5])] * 2
    equal = WorkerRows.of(two_equal_calls, 2, 100_000, "chains")
    assert [num_nodes(piece) for piece in pieces_of(equal)] == [5, 0]


def test_the_longest_call_is_added_to_the_maximum_size_of_a_piece() -> None:
    calls = siblings(4, 50, 10)
    assert len(pieces_of(WorkerRows.of(calls, 1, 59, "chains"))) == 1
    assert len(pieces_of(WorkerRows.of(calls, 1, 70, "chains"))) == 2


@pytest.mark.parametrize("attention", ["rows", "chains"])
def test_calls_that_share_almost_nothing_are_computed_as_plain_rows(attention: str) -> None:
    calls = siblings(3, 2, 100)

    split = WorkerRows.of(calls, 2, 1000, attention)

    assert split.forest is None and len(split.rows) == 4
    assert split.metrics == {"tokens_computed": 306.0, "tokens_saved": 0.0, "rho": 1.0}


def test_calls_with_a_shared_prompt_are_plain_rows_if_the_workers_cannot_share() -> None:
    assert WorkerRows.of(siblings(4, 50, 10), 1, 1000, "rows").forest is None


def test_a_batch_without_responses_has_no_rows() -> None:
    split = WorkerRows.of([call([1], [])], 2, 1000, "chains")
    assert split.rows == [] and split.metrics["rho"] == 1.0


def test_a_call_without_a_prompt_is_refused() -> None:
    with pytest.raises(BackendError, match="without a prompt"):
        WorkerRows.of([call([], [1])], 1, 1000, "chains")
