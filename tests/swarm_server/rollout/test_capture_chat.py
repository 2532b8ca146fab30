"""Capture of a complete chat answer: the record, and the answer that the app sees."""

from typing import Any

import orjson
import pytest

from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.types.weight_versions import CallStamp

Json = dict[str, Any]


def answer(logprobs: list[float] | None = None, ids: tuple[int, ...] = (7, 8)) -> Json:
    content = [
        {"token": "x", "logprob": lp} for lp in (logprobs if logprobs is not None else [-0.1, -0.2])
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": list(ids),
        "weight_versions": [{"version": 3, "start": 0, "end": 2}],
    }
    return {"choices": [choice], "usage": {"completion_tokens": 2}, "prompt_token_ids": [1, 2]}


STAMP = CallStamp([9])


def as_vllm_writes(reply: Json) -> bytes:
    """Return the answer as JSON, with NaN as null."""
    return orjson.dumps(reply)


def shown_to(body: Json, reply: Json | None = None) -> Json:
    return orjson.loads(ChatCapture(body, {}).answer(as_vllm_writes(reply or answer())))


def recorded(body: Json, reply: Json | None = None, defaults: Json | None = None) -> Any:
    capture = ChatCapture(body, defaults or {})
    capture.answer(as_vllm_writes(reply or answer()))
    return capture.record(STAMP)


def test_ids_logprobs_and_version_are_the_engines_own() -> None:
    call = recorded({"messages": []})
    assert (call.prompt_ids, call.response_ids, call.logprobs) == ([1, 2], [7, 8], [-0.1, -0.2])
    assert (call.version, call.untrainable) == (3, None)


def test_fields_that_the_app_did_not_request_are_null() -> None:
    shown = shown_to({"messages": []})
    choice = shown["choices"][0]
    assert (choice["logprobs"], choice["token_ids"], choice["weight_versions"]) == (
        None,
        None,
        None,
    )
    assert shown["prompt_token_ids"] is None


def test_fields_that_the_app_requested_are_kept() -> None:
    body: Json = {"messages": [], "logprobs": True, "return_token_ids": True}
    shown = shown_to(body)
    assert shown["choices"][0]["logprobs"] is not None
    assert shown["prompt_token_ids"] == [1, 2]


def test_unknown_fields_reach_the_engine() -> None:
    upstream = ChatCapture({"messages": [], "frobnicate": 1}, {}).upstream_body()
    assert upstream["frobnicate"] == 1 and upstream["return_token_ids"] is True


def without_spans() -> Json:
    reply = answer()
    del reply["choices"][0]["weight_versions"]
    return reply


def spans(call: Any) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in call.versions]


def test_the_stamps_version_is_used_if_the_engine_reports_no_version() -> None:
    assert spans(recorded({}, without_spans())) == [(9, 0, 2)]


def test_a_call_during_a_change_of_weights_has_one_span_per_version_over_all_tokens() -> None:
    capture = ChatCapture({}, {})
    capture.answer(as_vllm_writes(without_spans()))
    call = capture.record(CallStamp([3, 4]))
    assert spans(call) == [(3, 0, 2), (4, 0, 2)]
    assert call is not None and call.version == 3 and call.untrainable is None


@pytest.mark.parametrize(
    "reported",
    [
        [{"version": "default", "start": 0, "end": 2}],
        [{"version": 3, "start": 0, "end": 1}],
        [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 0, "end": 2}],
    ],
)
def test_spans_that_do_not_cover_each_token_with_one_version_are_not_used(reported: Any) -> None:
    reply = answer()
    reply["choices"][0]["weight_versions"] = reported
    assert spans(recorded({}, reply)) == [(9, 0, 2)]


def test_a_version_sent_as_a_string_of_digits_is_used() -> None:
    reply = answer()
    reply["choices"][0]["weight_versions"] = [{"version": "3", "start": 0, "end": 2}]
    assert spans(recorded({}, reply)) == [(3, 0, 2)]


def test_a_call_during_a_failed_change_of_weights_is_untrainable() -> None:
    capture = ChatCapture({}, {})
    capture.answer(as_vllm_writes(without_spans()))
    call = capture.record(CallStamp([3, 4], is_doubtful=True))
    assert call is not None and call.untrainable == "unknown_weights"


def test_the_engines_refusal_is_the_reason_of_each_call() -> None:
    capture = ChatCapture({"temperature": 0}, {}, refusal="its logprobs are raw")
    capture.answer(as_vllm_writes(answer()))
    call = capture.record(STAMP)
    assert call is not None and call.untrainable == "its logprobs are raw"


@pytest.mark.parametrize(
    ("body", "defaults", "reason"),
    [
        ({"temperature": 0}, {}, "sampling_not_trainable: temperature 0"),
        ({"top_p": 0.9}, {}, "sampling_not_trainable: top_p"),
        ({}, {"top_k": 20}, "sampling_not_trainable: top_k"),
        ({"logit_bias": {"5": 1}}, {}, "sampling_not_trainable: logit_bias"),
        ({"tool_choice": "required"}, {}, "sampling_not_trainable: tool_choice"),
        ({"n": 2}, {}, "sampling_not_trainable: n"),
        (
            {"tools": [{"function": {"name": "f", "strict": True}}]},
            {},
            "sampling_not_trainable: tools.strict",
        ),
        (
            {"response_format": {"type": "json_object"}},
            {},
            "sampling_not_trainable: response_format",
        ),
    ],
)
def test_a_call_not_sampled_from_the_whole_distribution_is_untrainable(
    body: Json, defaults: Json, reason: str
) -> None:
    assert recorded(body, defaults=defaults).untrainable == reason


@pytest.mark.parametrize(("requested", "used"), [(1e-45, 0.01), (0.7, 0.7), (0, 0)])
def test_the_recorded_temperature_is_the_one_the_engine_used(requested: float, used: float) -> None:
    assert recorded({"temperature": requested}).temperature == used


def test_an_explicit_null_means_the_engines_default() -> None:
    assert (
        recorded({"top_p": None}, defaults={"top_p": 0.8}).untrainable
        == "sampling_not_trainable: top_p"
    )


@pytest.mark.parametrize("logprobs", [[-0.1], [-0.1, -9999.0], [-0.1, float("nan")]])
def test_a_missing_logprob_is_never_padded(logprobs: list[float]) -> None:
    call = recorded({}, answer(logprobs))
    assert (call.untrainable, call.logprobs) == ("missing_logprob", None)
    assert call.to_wire().logprobs is None


def test_a_call_without_prompt_ids_is_untrainable() -> None:
    reply = answer()
    del reply["prompt_token_ids"]
    assert recorded({}, reply).untrainable == "missing_prompt_ids"


def test_an_answer_without_usage_is_untrainable() -> None:
    reply = answer()
    del reply["usage"]
    assert recorded({}, reply).untrainable == "missing_usage"


@pytest.mark.parametrize("finish", ["length", "tool_calls", "stop"])
def test_a_complete_answer_is_trainable_whatever_ended_it(finish: str) -> None:
    reply = answer()
    reply["choices"][0] |= {"finish_reason": finish, "stop_reason": "END"}
    assert recorded({}, reply).untrainable is None


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_aborted_answer_is_not_recorded(finish: str) -> None:
    reply = answer()
    reply["choices"][0]["finish_reason"] = finish
    assert recorded({}, reply) is None


def test_the_first_of_several_choices_is_recorded() -> None:
    reply = answer()
    other = reply["choices"][0] | {"index": 1, "token_ids": [5, 6, 7]}
    reply["choices"] = [other, reply["choices"][0]]
    assert recorded({"n": 2}, reply).response_ids == [7, 8]


@pytest.mark.parametrize("odd", [[], 5, [{"index": 0, "token_ids": "x"}], [None], {"a": 1}])
def test_an_unreadable_answer_is_relayed_unchanged_and_untrainable(odd: Any) -> None:
    raw = orjson.dumps({"choices": odd, "usage": 3})
    capture = ChatCapture({}, {})
    assert capture.answer(raw) == raw
    call = capture.record(STAMP)
    assert call is not None and call.untrainable == "unreadable_answer"


def test_a_call_with_fewer_ids_than_its_usage_is_untrainable() -> None:
    assert recorded({}, answer([-0.1], ids=(7,))).untrainable == "missing_token_ids"


def test_an_answer_without_a_finish_reason_is_not_recorded() -> None:
    reply = answer()
    reply["choices"][0]["finish_reason"] = None
    assert recorded({}, reply) is None


def test_logprobs_are_not_requested_for_fields_that_the_engine_refuses_without_them() -> None:
    for body in ({"top_logprobs": 2}, {"logprob_token_ids": [5]}):
        assert "logprobs" not in ChatCapture(body, {}).upstream_body()
    upstream = ChatCapture({"logprobs": True, "top_logprobs": 2}, {}).upstream_body()
    assert (upstream["logprobs"], upstream["top_logprobs"]) == (True, 2)


def test_a_null_for_top_logprobs_hides_logprobs_from_the_app_but_not_from_the_capture() -> None:
    body: Json = {"logprobs": True, "top_logprobs": None}
    assert ChatCapture(body, {}).upstream_body()["top_logprobs"] == 0
    assert shown_to(body)["choices"][0]["logprobs"] is None
    assert recorded(body).untrainable is None


NO_REASONING: Json = {"include_reasoning": False}


def test_hidden_reasoning_is_requested_from_the_engine_and_hidden_as_vllm_hides_it() -> None:
    assert ChatCapture(NO_REASONING, {}).upstream_body()["include_reasoning"] is True
    reply = answer()
    reply["choices"][0]["message"]["reasoning"] = "hm"
    assert shown_to(NO_REASONING, reply)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hi",
        "reasoning": None,
    }
    assert recorded(NO_REASONING, reply).untrainable is None


@pytest.mark.parametrize(
    "requested", [{"logprobs": True}, {"return_token_ids": True}, {"top_p": 0.5}]
)
def test_the_engine_hides_reasoning_if_the_app_requests_tokens_or_the_call_is_untrainable(
    requested: Json,
) -> None:
    assert ChatCapture(NO_REASONING | requested, {}).upstream_body()["include_reasoning"] is False
