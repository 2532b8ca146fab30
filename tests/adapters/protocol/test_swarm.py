"""Bounds of the protocol's models, the sibling header and packed numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakevllm_adapters.protocol.packed_numbers import (
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from fakevllm_adapters.protocol.swarm import EndGroupRequest, WorkflowOutput, parse_sibling


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rewards_must_be_finite(reward: float) -> None:
    with pytest.raises(ValidationError):
        EndGroupRequest(group_id="g", rewards=[1.0, reward])
    with pytest.raises(ValidationError):
        WorkflowOutput(reward=reward)


def test_a_group_has_a_maximum_size() -> None:
    with pytest.raises(ValidationError):
        EndGroupRequest(group_id="g", rewards=[1.0] * 257)


@pytest.mark.parametrize("header", ["", "g", "/1", "g/", "g/-1", "g/x"])
def test_a_sibling_header_that_is_not_group_slash_index_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="must read <group id>/<index>"):
        parse_sibling(header)


def test_a_group_id_may_contain_a_slash() -> None:
    ref = parse_sibling("a/b/3")
    assert (ref.group_id, ref.index, ref.episode_id) == ("a/b", 3, "a/b/3")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_survive_a_round_trip(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_floats_survive_a_round_trip(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values
