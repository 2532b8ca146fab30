"""Checks of what vLLM can do, from its responses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from fakevllm_server.backends.vllm.capability_checks import (
    UPDATE_ROUTES,
    CheckResult,
    check_logprobs,
    check_model_name,
    check_reasoning,
    check_sampled_distribution,
    check_token_ids,
    check_tool_calls,
    check_version,
    check_weight_update,
    training_refusal,
)
from fakevllm_server.backends.vllm.response import VllmResponse

LOGITS = [0.0, -1.0, -2.5, -4.0]


def response(body: Any, status: int = 200) -> VllmResponse:
    return VllmResponse(status, json.dumps(body).encode())


def completion(**changed: Any) -> VllmResponse:
    """Create a completion with two prompt tokens and two sampled tokens."""
    choice = {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}
    body = {
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        "choices": [choice | changed.pop("choice", {})],
    }
    return response(body | changed)


def with_top_logprobs(
    logits: Sequence[float], temperature: float, ids: Sequence[int] = range(4)
) -> VllmResponse:
    total = math.log(sum(math.exp(logit / temperature) for logit in logits))
    alternatives = [
        {"token": f"token_id:{token}", "logprob": logits[token] / temperature - total}
        for token in ids
    ]
    return completion(
        choice={"logprobs": {"content": [{"logprob": -1, "top_logprobs": alternatives}]}}
    )


def test_another_model_name_is_reported_with_the_name_that_apps_must_use() -> None:
    assert check_model_name("m", "m", 512).is_ok
    result = check_model_name("theirs", "ours", 512)
    assert not result.is_ok and not result.is_required
    assert "apps must use 'theirs'" in result.finding
    assert result.fix == "--served-model-name ours"


def test_token_ids_that_match_the_usage_succeed() -> None:
    assert check_token_ids(completion()).is_ok


@pytest.mark.parametrize(
    "bad",
    [
        completion(prompt_token_ids=None),
        completion(choice={"token_ids": None}),
        completion(choice={"token_ids": [3]}),
        completion(prompt_token_ids=[1, 2, 3]),
        completion(usage=None),
        response({"error": {"message": "no"}}, 400),
        response([]),
    ],
)
def test_token_ids_that_are_missing_or_differ_from_the_usage_fail(bad: VllmResponse) -> None:
    result = check_token_ids(bad)
    assert result.is_required and not result.is_ok and result.fix


def test_one_finite_logprob_for_each_token_succeeds() -> None:
    assert check_logprobs(completion()).is_ok


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"content": None},
        {"content": [{"logprob": -0.5}]},
        {"content": [{"logprob": -0.5}, {"logprob": None}]},
        {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]},
        {"content": [{"logprob": -0.5}, {"logprob": 0.5}]},
    ],
)
def test_missing_and_invalid_logprobs_fail(logprobs: Any) -> None:
    result = check_logprobs(completion(choice={"logprobs": logprobs}))
    assert result.is_required and not result.is_ok


def test_gaps_that_halve_at_twice_the_temperature_are_those_of_the_sampled_distribution() -> None:
    assert check_sampled_distribution(
        with_top_logprobs(LOGITS, 1), with_top_logprobs(LOGITS, 2)
    ).is_ok


def test_gaps_that_do_not_change_with_the_temperature_fail_and_name_the_flag() -> None:
    result = check_sampled_distribution(with_top_logprobs(LOGITS, 1), with_top_logprobs(LOGITS, 1))
    assert not result.is_ok
    assert "--logprobs-mode processed_logprobs" in str(result)


def test_only_tokens_reported_at_both_temperatures_are_compared() -> None:
    one, two = with_top_logprobs(LOGITS, 1, [0, 1, 3]), with_top_logprobs(LOGITS, 2, [0, 1, 2])
    assert check_sampled_distribution(one, two).is_ok


def test_gaps_with_any_other_ratio_fail() -> None:
    assert not check_sampled_distribution(
        with_top_logprobs(LOGITS, 1), with_top_logprobs(LOGITS, 0.5)
    ).is_ok


@pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0, 0.0], [0.0]])
def test_an_inconclusive_distribution_fails(logits: list[float]) -> None:
    ids = range(len(logits))
    result = check_sampled_distribution(
        with_top_logprobs(logits, 1, ids), with_top_logprobs(logits, 2, ids)
    )
    assert not result.is_ok and result.is_required


def test_a_route_that_refuses_a_get_exists() -> None:
    assert check_weight_update(dict.fromkeys(UPDATE_ROUTES, response({}, 405))).is_ok


def test_a_missing_route_is_named_with_the_variable_that_enables_it() -> None:
    routes = dict.fromkeys(UPDATE_ROUTES, response({}, 405)) | {"/pause": response({}, 404)}
    result = check_weight_update(routes)
    assert "/pause" in result.finding and "/resume" not in result.finding
    assert "VLLM_SERVER_DEV_MODE=1" in result.fix


def test_refused_tools_name_the_parser_that_fits_the_chat_template() -> None:
    refused = response({"error": {"message": '"auto" tool choice requires …'}}, 400)
    result = check_tool_calls(refused, "<tool_call>")
    assert not result.is_ok and not result.is_required
    assert result.fix == "--enable-auto-tool-choice --tool-call-parser hermes"
    assert "NAME" in check_tool_calls(refused, None).fix


@pytest.mark.parametrize(
    ("parser", "template", "is_ok"),
    [("qwen3", "<think>", True), ("", "<think>", False), ("", "plain", True), ("", None, True)],
)
def test_a_template_with_think_needs_a_reasoning_parser(
    parser: str, template: str | None, is_ok: bool
) -> None:
    info = response({"vllm_config": {"structured_outputs_config": {"reasoning_parser": parser}}})
    assert check_reasoning(info, template).is_ok == is_ok


def test_an_unreported_reasoning_parser_succeeds() -> None:
    result = check_reasoning(response({}, 404), "<think>")
    assert result.is_ok and result.finding == "not reported"


@pytest.mark.parametrize(("version", "is_ok"), [("0.27.1", True), ("0.40.0", False), (None, False)])
def test_an_untested_version_is_reported_and_not_required(version: str | None, is_ok: bool) -> None:
    result = check_version(response({"version": version}))
    assert result.is_ok == is_ok and not result.is_required


def test_a_refusal_lists_all_required_checks_that_failed_with_their_fixes() -> None:
    results = [
        CheckResult("a", True, "fine", is_required=True),
        CheckResult("b", False, "it is raw", "--flag", is_required=True),
        CheckResult("c", False, "only a pity", "--other"),
        CheckResult("d", False, "it is shut", is_required=True),
    ]
    assert training_refusal(results) == (
        "vLLM cannot be trained with: it is raw (start it with --flag); it is shut"
    )
    assert training_refusal(results[:1]) is None
