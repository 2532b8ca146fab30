"""What a vLLM's answers say of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from fakevllm_server.backends.vllm import verdicts
from fakevllm_server.backends.vllm.answer import Answer
from fakevllm_server.backends.vllm.verdicts import UPDATE_ROUTES, Verdict, refusal_of

LOGITS = [0.0, -1.0, -2.5, -4.0]


def answer(body: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(body).encode())


def completion(**changed: Any) -> Answer:
    """Of two prompt and two sampled tokens."""
    choice = {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}
    body = {
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        "choices": [choice | changed.pop("choice", {})],
    }
    return answer(body | changed)


def top(logits: Sequence[float], temperature: float, ids: Sequence[int] = range(4)) -> Answer:
    total = math.log(sum(math.exp(logit / temperature) for logit in logits))
    named = [
        {"token": f"token_id:{token}", "logprob": logits[token] / temperature - total}
        for token in ids
    ]
    return completion(choice={"logprobs": {"content": [{"logprob": -1, "top_logprobs": named}]}})


def test_a_model_under_another_name_is_told_with_the_name_that_apps_must_use() -> None:
    assert verdicts.model_name("m", "m", 512).ok
    found = verdicts.model_name("theirs", "ours", 512)
    assert not found.ok and not found.is_needed
    assert "apps must use 'theirs'" in found.found
    assert found.mend == "--served-model-name ours"


def test_ids_as_many_as_counted_can_be_trained_on() -> None:
    assert verdicts.token_ids(completion()).ok


@pytest.mark.parametrize(
    "bad",
    [
        completion(prompt_token_ids=None),
        completion(choice={"token_ids": None}),
        completion(choice={"token_ids": [3]}),
        completion(prompt_token_ids=[1, 2, 3]),
        completion(usage=None),
        answer({"error": {"message": "no"}}, 400),
        answer([]),
    ],
)
def test_ids_that_lack_or_differ_from_the_count_cannot(bad: Answer) -> None:
    found = verdicts.token_ids(bad)
    assert found.is_needed and not found.ok and found.mend


def test_one_finite_logprob_a_token_can_be_trained_on() -> None:
    assert verdicts.logprobs(completion()).ok


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
def test_logprobs_that_lack_or_are_none_cannot(logprobs: Any) -> None:
    found = verdicts.logprobs(completion(choice={"logprobs": logprobs}))
    assert found.is_needed and not found.ok


def test_gaps_that_halve_at_twice_the_temperature_are_of_the_sampled_distribution() -> None:
    assert verdicts.sampled_distribution(top(LOGITS, 1), top(LOGITS, 2)).ok


def test_gaps_that_stay_are_of_another_distribution_and_the_flag_is_named() -> None:
    found = verdicts.sampled_distribution(top(LOGITS, 1), top(LOGITS, 1))
    assert not found.ok
    assert "--logprobs-mode processed_logprobs" in str(found)


def test_only_tokens_that_both_temperatures_name_are_compared() -> None:
    one, two = top(LOGITS, 1, [0, 1, 3]), top(LOGITS, 2, [0, 1, 2])
    assert verdicts.sampled_distribution(one, two).ok


def test_gaps_of_neither_kind_are_not_trusted() -> None:
    assert not verdicts.sampled_distribution(top(LOGITS, 1), top(LOGITS, 0.5)).ok


@pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0, 0.0], [0.0]])
def test_what_cannot_be_told_apart_is_not_trusted(logits: list[float]) -> None:
    ids = range(len(logits))
    found = verdicts.sampled_distribution(top(logits, 1, ids), top(logits, 2, ids))
    assert not found.ok and found.is_needed


def test_a_route_that_a_get_may_not_use_is_there() -> None:
    assert verdicts.weight_update(dict.fromkeys(UPDATE_ROUTES, answer({}, 405))).ok


def test_a_route_that_lacks_is_named_with_the_variable_that_brings_it() -> None:
    routes = dict.fromkeys(UPDATE_ROUTES, answer({}, 405)) | {"/pause": answer({}, 404)}
    found = verdicts.weight_update(routes)
    assert "/pause" in found.found and "/resume" not in found.found
    assert "VLLM_SERVER_DEV_MODE=1" in found.mend


def test_refused_tools_name_the_parser_of_the_chat_template() -> None:
    refused = answer({"error": {"message": '"auto" tool choice requires …'}}, 400)
    found = verdicts.tool_calls(refused, "<tool_call>")
    assert not found.ok and not found.is_needed
    assert found.mend == "--enable-auto-tool-choice --tool-call-parser hermes"
    assert "NAME" in verdicts.tool_calls(refused, None).mend


@pytest.mark.parametrize(
    ("parser", "template", "is_ok"),
    [("qwen3", "<think>", True), ("", "<think>", False), ("", "plain", True), ("", None, True)],
)
def test_a_template_that_thinks_wants_a_reasoning_parser(
    parser: str, template: str | None, is_ok: bool
) -> None:
    info = answer({"vllm_config": {"structured_outputs_config": {"reasoning_parser": parser}}})
    assert verdicts.reasoning(info, template).ok == is_ok


def test_where_the_reasoning_parser_is_not_told_nothing_is_claimed() -> None:
    found = verdicts.reasoning(answer({}, 404), "<think>")
    assert found.ok and found.found == "not told"


@pytest.mark.parametrize(("told", "is_ok"), [("0.27.1", True), ("0.40.0", False), (None, False)])
def test_an_untried_version_is_told_and_refuses_nothing(told: str | None, is_ok: bool) -> None:
    found = verdicts.version(answer({"version": told}))
    assert found.ok == is_ok and not found.is_needed


def test_a_refusal_is_one_sentence_of_all_that_is_needed_with_its_flags() -> None:
    found = [
        Verdict("a", True, "fine", is_needed=True),
        Verdict("b", False, "it is raw", "--flag", is_needed=True),
        Verdict("c", False, "only a pity", "--other"),
        Verdict("d", False, "it is shut", is_needed=True),
    ]
    assert refusal_of(found) == (
        "vLLM cannot be trained with: it is raw (start it with --flag); it is shut"
    )
    assert refusal_of(found[:1]) is None
