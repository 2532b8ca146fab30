from __future__ import annotations

from typing import Any

import pytest

from fakevllm_server.sampling_rules import why_not_trainable

Json = dict[str, Any]
BENT: list[Json] = [
    {"presence_penalty": 0.1},
    {"frequency_penalty": -1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1}},
    {"structured_outputs": {"regex": "a"}},
    {"allowed_token_ids": [1]},
    {"bad_words": ["x"]},
    {"min_tokens": 2},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
    {"response_format": {"type": "structural_tag", "format": {}}},
    {"logits_processors": ["x"]},
]


@pytest.mark.parametrize("bent", BENT)
def test_what_bends_the_distribution_is_not_trained_on(bent: Json) -> None:
    reason = why_not_trainable(bent)
    assert reason == f"sampling_not_trainable: {next(iter(bent))}"


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
    assert why_not_trainable(plain) is None
