from __future__ import annotations

from typing import Any

import pytest

from fakevllm_server.rollout.sampling_rules import truncations, untrainable_sampling

Json = dict[str, Any]
DISTORTING: list[Json] = [
    {"presence_penalty": 0.1},
    {"frequency_penalty": -1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1}},
    {"logits_processors": ["x"]},
    {"n": 2},
]
TRUNCATING: list[Json] = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"structured_outputs": {"regex": "a"}},
    {"allowed_token_ids": [1]},
    {"bad_words": ["x"]},
    {"min_tokens": 2},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
    {"response_format": {"type": "structural_tag", "format": {}}},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
]


@pytest.mark.parametrize("requested", [*DISTORTING, *TRUNCATING])
def test_sampling_from_a_changed_distribution_is_untrainable(requested: Json) -> None:
    reason = untrainable_sampling(requested)
    assert reason is not None
    assert reason.removesuffix(".strict") == f"sampling_not_trainable: {next(iter(requested))}"


@pytest.mark.parametrize("truncating", TRUNCATING)
def test_truncated_sampling_is_trainable_if_the_engine_reports_the_allowed_tokens(
    truncating: Json,
) -> None:
    assert untrainable_sampling(truncating, reports_allowed=True) is None
    assert len(truncations(truncating)) == 1


@pytest.mark.parametrize("distorting", DISTORTING)
def test_distorted_sampling_is_never_trainable(distorting: Json) -> None:
    reason = f"sampling_not_trainable: {next(iter(distorting))}"
    assert untrainable_sampling(distorting | {"top_p": 0.9}, reports_allowed=True) == reason
    assert truncations(distorting) == []


def test_greedy_sampling_is_never_trainable() -> None:
    reason = untrainable_sampling({"temperature": 0, "top_p": 0.9}, reports_allowed=True)
    assert reason == "sampling_not_trainable: temperature 0"


def test_fields_that_only_end_the_answer_or_cut_the_prompt_leave_a_call_trainable() -> None:
    plain = {
        "stop": ["x"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "truncate_prompt_tokens": 9,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
    }
    assert untrainable_sampling(plain) is None and truncations(plain) == []
