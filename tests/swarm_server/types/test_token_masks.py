from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.packed_numbers import pack_ids
from fakevllm_server.types.token_masks import MAX_BYTES, TokenMasks, packed, unpacked


def packed_set_of(*ids: int) -> bytes:
    return packed(sum(1 << id for id in ids).to_bytes(40, "little"))


@given(st.lists(st.one_of(st.none(), st.sets(st.integers(0, 300), min_size=1)), max_size=8))
def test_masks_are_unchanged_after_a_round_trip_over_the_wire(
    sets: list[set[int] | None],
) -> None:
    masks = TokenMasks.from_packed_sets(
        [None if ids is None else packed_set_of(*ids) for ids in sets]
    )
    parsed = TokenMasks.from_wire(masks.to_wire())
    assert parsed == masks
    assert parsed.is_forced == [ids is not None and len(ids) == 1 for ids in sets]
    for position, ids in enumerate(sets):
        packed_set = parsed.packed_set_at(position)
        bits = None if packed_set is None else int.from_bytes(unpacked(packed_set), "little")
        assert bits == (None if ids is None else sum(1 << id for id in ids))


def test_a_repeated_set_is_stored_once() -> None:
    masks = TokenMasks.from_packed_sets(
        [packed_set_of(1, 2), None, packed_set_of(3, 4), packed_set_of(1, 2)]
    )
    assert (len(masks.sets), list(masks.set_indices)) == (2, [0, -1, 1, 0])


def test_masks_contain_only_responses_whose_tokens_are_in_their_sets() -> None:
    masks = TokenMasks.from_packed_sets([packed_set_of(1, 299), None])
    assert masks.contains_response([299, 7]) and masks.contains_response([1, 5000])
    for ids in ([2, 7], [300, 7], [100_000, 7], [1], [1, 7, 7]):
        assert not masks.contains_response(ids)


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"sets": [], "of_token": "not base64!"},
        {"sets": [], "of_token": pack_ids([0])},
        {"sets": [], "of_token": pack_ids([-2])},
        {"sets": ["%%%"], "of_token": pack_ids([0])},
        {"sets": [5], "of_token": pack_ids([0])},
    ],
)
def test_malformed_masks_are_refused(wire: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        TokenMasks.from_wire(wire)


@pytest.mark.parametrize(
    "packed_set",
    [b"", b"no zlib at all", packed_set_of(1)[:-2], packed(b"\1" * (MAX_BYTES + 1))],
)
def test_masks_with_an_unreadable_set_are_refused(packed_set: bytes) -> None:
    with pytest.raises(ValueError):
        unpacked(packed_set)
    wire = {"sets": [base64.b64encode(packed_set).decode()], "of_token": pack_ids([0])}
    assert TokenMasks.from_engine_answer(wire, [0]) is None


def test_equal_sets_are_packed_once_and_cached() -> None:
    assert packed_set_of(1, 2) is packed_set_of(1, 2)
