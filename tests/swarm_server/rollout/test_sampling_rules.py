from __future__ import annotations

from typing import Any

import pytest

from fakevllm_server.rollout.sampling_rules import truncations, untrainable_sampling

Json = dict[str, Any]
BENT: list[Json] = [
    {"presence_penalty": 0.1},
    {"frequency_penalty": -1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1}},
    {"logits_processors": ["x"]},
    {"n": 2},
]
CUT: list[Json] = [
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


@pytest.mark.parametrize("asked", [*BENT, *CUT])
def test_what_is_not_drawn_from_the_whole_softmax_is_not_trained_on(asked: Json) -> None:
    reason = untrainable_sampling(asked)
    assert reason is not None
    assert reason.removesuffix(".strict") == f"sampling_not_trainable: {next(iter(asked))}"


@pytest.mark.parametrize("cut", CUT)
def test_what_leaves_tokens_out_is_trained_on_where_the_engine_tells_what_was_left(
    cut: Json,
) -> None:
    assert untrainable_sampling(cut, reports_allowed=True) is None
    assert len(truncations(cut)) == 1


@pytest.mark.parametrize("bent", BENT)
def test_what_changes_proportions_is_trained_on_nowhere(bent: Json) -> None:
    reason = f"sampling_not_trainable: {next(iter(bent))}"
    assert untrainable_sampling(bent | {"top_p": 0.9}, reports_allowed=True) == reason
    assert truncations(bent) == []


def test_greedy_answers_are_trained_on_nowhere() -> None:
    reason = untrainable_sampling({"temperature": 0, "top_p": 0.9}, reports_allowed=True)
    assert reason == "sampling_not_trainable: temperature 0"


def test_what_only_ends_or_cuts_the_prompt_leaves_a_call_trainable() -> None:
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
