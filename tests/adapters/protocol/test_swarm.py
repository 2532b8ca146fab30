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


def reply_with(*prompts: list[str]) -> EndGroupReply:
    calls = [
        [
            CapturedCall(
                prompt_ids=prompt,
                response_ids="",
                logprobs=None,
                temperature=1.0,
                finish_reason=None,
            )
            for prompt in own
        ]
        for own in prompts
    ]
    return EndGroupReply(success=True, calls=calls)


def test_a_reply_can_have_each_prompt_once() -> None:
    reply = reply_with(["a"], ["a", "b"], [], ["a"])
    short = reply.with_prompts_once()
    assert short.prompts == ["a", "b"]
    assert [[call.prompt for call in own] for own in short.calls] == [[0], [0, 1], [], [0]]
    assert all(call.prompt_ids == "" for own in short.calls for call in own)
    assert EndGroupReply.model_validate_json(short.model_dump_json()).with_prompts_per_call() == (
        reply
    )


def test_a_reply_of_an_older_server_has_its_prompts_already() -> None:
    reply = reply_with(["a"], ["b"])
    assert reply.with_prompts_per_call() == reply
