from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.packed_numbers import pack_ids
from fakevllm_server.types.token_masks import MAX_BYTES, TokenMasks, packed, unpacked


def one_of(*ids: int) -> bytes:
    return packed(sum(1 << id for id in ids).to_bytes(40, "little"))


@given(st.lists(st.one_of(st.none(), st.sets(st.integers(0, 300), min_size=1)), max_size=8))
def test_what_tokens_were_chosen_from_comes_over_the_wire_as_it_was(
    chosen_from: list[set[int] | None],
) -> None:
    allowed = TokenMasks.of([None if ids is None else one_of(*ids) for ids in chosen_from])
    told = TokenMasks.from_wire(allowed.to_wire())
    assert told == allowed
    assert told.is_forced == [ids is not None and len(ids) == 1 for ids in chosen_from]
    for at, ids in enumerate(chosen_from):
        one = told.set_of(at)
        held = None if one is None else int.from_bytes(unpacked(one), "little")
        assert held == (None if ids is None else sum(1 << id for id in ids))


def test_a_set_that_comes_again_travels_once() -> None:
    allowed = TokenMasks.of([one_of(1, 2), None, one_of(3, 4), one_of(1, 2)])
    assert (len(allowed.sets), list(allowed.of_token)) == (2, [0, -1, 1, 0])


def test_a_response_is_held_by_its_own_sets_alone() -> None:
    allowed = TokenMasks.of([one_of(1, 299), None])
    assert allowed.holds([299, 7]) and allowed.holds([1, 5000])
    for ids in ([2, 7], [300, 7], [100_000, 7], [1], [1, 7, 7]):
        assert not allowed.holds(ids)


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
def test_what_no_engine_of_ours_writes_is_refused(wire: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        TokenMasks.from_wire(wire)


@pytest.mark.parametrize(
    "one", [b"", b"no zlib at all", one_of(1)[:-2], packed(b"\1" * (MAX_BYTES + 1))]
)
def test_a_set_that_cannot_be_read_holds_nothing(one: bytes) -> None:
    with pytest.raises(ValueError):
        unpacked(one)
    wire = {"sets": [base64.b64encode(one).decode()], "of_token": pack_ids([0])}
    assert TokenMasks.read(wire, [0]) is None


def test_siblings_of_one_grammar_share_their_sets() -> None:
    assert one_of(1, 2) is one_of(1, 2)
