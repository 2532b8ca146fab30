"""Ids are checked exactly, whichever way they arrive."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.samples import call

from fakevllm_adapters.protocol.packed_numbers import id_bytes
from fakevllm_server.types.calls import MAX_ID, are_ids, checked_ids, with_prompts_apart
from fakevllm_server.types.number_arrays import id_array, ids_from_bytes

JSON_VALUES = st.one_of(
    *(st.integers(), st.integers(0, MAX_ID), st.sampled_from([0, -1, MAX_ID, MAX_ID + 1, 2**64])),
    *(st.booleans(), st.none(), st.floats(), st.text(), st.lists(st.integers(0, 9), max_size=2)),
)


@given(values=st.lists(JSON_VALUES, max_size=5))
def test_values_are_taken_as_ids_exactly_if_all_of_them_are_ids(values: list[object]) -> None:
    if are_ids(values):
        assert checked_ids(values) == values
    else:
        with pytest.raises(ValueError, match="not ids"):
            checked_ids(values)


@given(ids=st.lists(st.integers(0, MAX_ID)))
def test_ids_survive_their_bytes(ids: list[int]) -> None:
    assert ids_from_bytes(id_bytes(ids)) == ids == ids_from_bytes(id_bytes(id_array(ids)))


@pytest.mark.parametrize("raw", [b"\0\0\0", array("i", [3, -1]).tobytes()])
def test_bytes_that_are_not_ids_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        ids_from_bytes(raw)


def test_calls_with_equal_prompts_refer_to_one_prompt() -> None:
    one, other = call(), replace(call(), prompt_ids=[9, 9])
    wire, prompts = with_prompts_apart([[one, other], [], [replace(other, prompt_ids=[9, 9]), one]])
    assert [[each.prompt for each in own] for own in wire] == [[0, 1], [], [1, 0]]
    assert prompts == [id_bytes(one.prompt_ids), id_bytes([9, 9])]
