from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_server.backends.embedded.decode.radix_tree import RadixTree

Payload = tuple[int, ...]
"""The ids of an edge themselves, so that a wrong split or join shows."""


def make_tree(max_tokens: int) -> RadixTree[Payload]:
    return RadixTree(max_tokens, lambda payload, length: (payload[:length], payload[length:]))


def add(tree: RadixTree[Payload], ids: Sequence[int], salt: bytes = b"") -> None:
    tree.insert(array("i", ids), lambda begin, end: tuple(ids[begin:end]), salt)


def matched(tree: RadixTree[Payload], ids: Sequence[int], salt: bytes = b"") -> Payload:
    """Return the ids that the tree has of the beginning of `ids`, read from the payloads."""
    parts = tree.match(array("i", ids), salt)
    return tuple(number for payload, length in parts for number in payload[:length])


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=25)


@given(inserted=SEQUENCES, query=st.lists(st.integers(0, 2), max_size=14))
def test_a_match_is_the_longest_common_beginning_with_any_inserted_sequence(
    inserted: list[list[int]], query: list[int]
) -> None:
    tree = make_tree(1000)
    for ids in inserted:
        add(tree, ids)

    longest = max((common_length(ids, query) for ids in inserted), default=0)

    assert tree.num_matching(array("i", query)) == longest
    assert matched(tree, query) == tuple(query[:longest])


@given(inserted=SEQUENCES)
def test_a_token_that_sequences_share_is_counted_once(inserted: list[list[int]]) -> None:
    tree = make_tree(1000)
    for ids in inserted:
        add(tree, ids)

    beginnings = {tuple(ids[: end + 1]) for ids in inserted for end in range(len(ids))}
    assert tree.num_tokens == len(beginnings)


@settings(max_examples=200)
@given(inserted=SEQUENCES, max_tokens=st.integers(0, 20))
def test_the_bound_holds_and_the_newest_sequence_is_kept_if_it_fits(
    inserted: list[list[int]], max_tokens: int
) -> None:
    tree = make_tree(max_tokens)
    for ids in inserted:
        before = tree.num_tokens
        add(tree, ids)

        assert 0 <= tree.num_tokens <= max_tokens
        if len(ids) <= max_tokens:
            assert matched(tree, ids) == tuple(ids)
        else:
            assert tree.num_tokens == before, "a sequence above the bound changes nothing"
    for ids in inserted:
        kept = matched(tree, ids)
        assert kept == tuple(ids[: len(kept)]), "what is left is right"


def test_the_least_recently_used_leaf_is_evicted_and_the_shared_beginning_stays() -> None:
    tree = make_tree(10)
    add(tree, [1, 2, 3, 4])
    add(tree, [1, 2, 5, 6])
    add(tree, [7, 8, 9])
    matched(tree, [1, 2, 3, 4])

    add(tree, [0, 0])

    assert matched(tree, [1, 2, 5, 6]) == (1, 2)
    assert matched(tree, [1, 2, 3, 4]) == (1, 2, 3, 4)
    assert matched(tree, [7, 8, 9]) == (7, 8, 9) and matched(tree, [0, 0]) == (0, 0)


def test_a_node_whose_children_are_evicted_can_be_evicted_too() -> None:
    tree = make_tree(6)
    add(tree, [1, 2, 3])
    add(tree, [1, 2, 4])

    add(tree, [9, 9, 9, 9, 9, 9])

    assert tree.num_tokens == 6 and matched(tree, [1, 2]) == ()


@given(inserted=SEQUENCES)
def test_sequences_with_different_salts_share_nothing(inserted: list[list[int]]) -> None:
    tree = make_tree(1000)
    for index, ids in enumerate(inserted):
        add(tree, ids, salt=bytes([index]))

    assert tree.num_tokens == sum(map(len, inserted))
    assert matched(tree, [0, 1, 2], salt=b"other") == ()


def test_a_cleared_tree_is_empty_and_can_be_filled_again() -> None:
    tree = make_tree(4)
    add(tree, [1, 2, 3])

    tree.clear()

    assert tree.num_tokens == 0 and matched(tree, [1, 2, 3]) == ()
    add(tree, [4, 5, 6, 7])
    add(tree, [1, 2, 3])
    assert matched(tree, [1, 2, 3]) == (1, 2, 3)
