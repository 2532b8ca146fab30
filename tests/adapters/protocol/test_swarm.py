"""Bounds of the protocol's models, the sibling header and packed numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakevllm_adapters.protocol.packed_numbers import (
    id_bytes,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from fakevllm_adapters.protocol.separate_prompts import parse_sizes, sizes_header
from fakevllm_adapters.protocol.swarm import (
    CapturedCall,
    EndGroupReply,
    EndGroupRequest,
    WorkflowOutput,
    parse_sibling,
    parse_siblings,
)


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


@pytest.mark.parametrize("header", ["g/0", "a/b/3", "g/1-7", "a-1/b-2/3-4", "g/0-255"])
def test_a_header_names_one_sibling_or_a_range(header: str) -> None:
    assert parse_siblings(header).header == header


def test_the_siblings_of_a_range_are_in_the_order_of_the_choices() -> None:
    assert [ref.episode_id for ref in parse_siblings("g/2-4").siblings] == ["g/2", "g/3", "g/4"]


@pytest.mark.parametrize(
    "header", ["", "g", "/1-2", "g/1-", "g/-2", "g/2-1", "g/1-1", "g/1-2-3", "g/0-256", "g/a-b"]
)
def test_a_header_without_a_valid_range_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="X-Fakevllm-Sibling must"):
        parse_siblings(header)


def captured(prompt_ids: str = "", prompt: int | None = None) -> CapturedCall:
    return CapturedCall(
        prompt_ids=prompt_ids,
        prompt=prompt,
        response_ids="",
        logprobs=None,
        temperature=1.0,
        finish_reason=None,
    )


def test_a_reply_can_have_its_prompts_in_front_of_its_json() -> None:
    calls = [[captured(prompt=0)], [captured(prompt=0), captured(prompt=1)], []]
    prompts = [id_bytes([1, 2]), id_bytes([3])]
    reply = EndGroupReply(success=True, calls=calls, prompts=prompts)
    raw = b"".join([*prompts, reply.model_dump_json().encode()])
    sizes = parse_sizes(sizes_header(prompts))
    assert EndGroupReply.from_response(raw, sizes) == reply
    per_call = reply.with_prompts_per_call()
    one, two = pack_ids([1, 2]), pack_ids([3])
    assert [[call.prompt_ids for call in own] for own in per_call.calls] == [[one], [one, two], []]
    assert all(call.prompt is None for own in per_call.calls for call in own)


def test_a_reply_whose_call_refers_to_a_missing_prompt_is_malformed() -> None:
    reply = EndGroupReply(success=True, calls=[[captured(prompt=0)]])
    with pytest.raises(ValueError, match="missing"):
        EndGroupReply.from_response(reply.model_dump_json().encode(), [])


def test_a_reply_of_an_older_server_has_its_prompts_already() -> None:
    reply = EndGroupReply(success=True, calls=[[captured("a")], [captured("b")]])
    assert reply.with_prompts_per_call() == reply
