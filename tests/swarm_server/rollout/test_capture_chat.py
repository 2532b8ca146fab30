"""What is kept of a whole answer, and what the app sees of it."""

from typing import Any

import orjson
import pytest

from fakevllm_server.rollout.capture.chat import ChatCapture
from fakevllm_server.types.weight_gate import CallStamp

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
    """NaN is printed as null."""
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


def test_what_the_app_did_not_ask_for_is_null_again() -> None:
    shown = shown_to({"messages": []})
    choice = shown["choices"][0]
    assert (choice["logprobs"], choice["token_ids"], choice["weight_versions"]) == (
        None,
        None,
        None,
    )
    assert shown["prompt_token_ids"] is None


def test_what_the_app_asked_for_stays() -> None:
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


def test_the_stamps_version_stands_in_where_the_engine_tells_none() -> None:
    assert spans(recorded({}, without_spans())) == [(9, 0, 2)]


def test_a_call_across_a_change_of_weights_has_a_span_of_each_over_all_of_it() -> None:
    capture = ChatCapture({}, {})
    capture.answer(as_vllm_writes(without_spans()))
    call = capture.record(CallStamp([3, 4]))
    assert spans(call) == [(3, 0, 2), (4, 0, 2)]
    assert call is not None and call.version == 3 and call.untrainable is None


@pytest.mark.parametrize(
    "told",
    [
        [{"version": "default", "start": 0, "end": 2}],
        [{"version": 3, "start": 0, "end": 1}],
        [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 0, "end": 2}],
    ],
)
def test_spans_that_do_not_say_which_weights_sampled_each_token_are_not_used(told: Any) -> None:
    reply = answer()
    reply["choices"][0]["weight_versions"] = told
    assert spans(recorded({}, reply)) == [(9, 0, 2)]


def test_a_version_told_as_a_word_of_digits_counts() -> None:
    reply = answer()
    reply["choices"][0]["weight_versions"] = [{"version": "3", "start": 0, "end": 2}]
    assert spans(recorded({}, reply)) == [(3, 0, 2)]


def test_a_call_under_a_failed_change_of_weights_trains_nothing() -> None:
    capture = ChatCapture({}, {})
    capture.answer(as_vllm_writes(without_spans()))
    call = capture.record(CallStamp([3, 4], is_doubtful=True))
    assert call is not None and call.untrainable == "unknown_weights"


def test_an_engine_nothing_may_train_on_says_so_in_every_call() -> None:
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
def test_a_call_not_sampled_from_the_whole_distribution_is_masked(
    body: Json, defaults: Json, reason: str
) -> None:
    assert recorded(body, defaults=defaults).untrainable == reason


@pytest.mark.parametrize(("asked", "used"), [(1e-45, 0.01), (0.7, 0.7), (0, 0)])
def test_the_temperature_is_the_one_the_engine_used(asked: float, used: float) -> None:
    assert recorded({"temperature": asked}).temperature == used


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


def test_a_call_whose_prompt_is_not_known_says_so() -> None:
    reply = answer()
    del reply["prompt_token_ids"]
    assert recorded({}, reply).untrainable == "missing_prompt_ids"


def test_an_answer_without_usage_cannot_be_checked_and_is_not_trained() -> None:
    reply = answer()
    del reply["usage"]
    assert recorded({}, reply).untrainable == "missing_usage"


@pytest.mark.parametrize("finish", ["length", "tool_calls", "stop"])
def test_an_answer_that_came_to_its_end_trains_as_it_was_sampled(finish: str) -> None:
    reply = answer()
    reply["choices"][0] |= {"finish_reason": finish, "stop_reason": "END"}
    assert recorded({}, reply).untrainable is None


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_answer_that_was_cut_off_is_no_call(finish: str) -> None:
    reply = answer()
    reply["choices"][0]["finish_reason"] = finish
    assert recorded({}, reply) is None


def test_of_several_choices_the_first_is_kept() -> None:
    reply = answer()
    other = reply["choices"][0] | {"index": 1, "token_ids": [5, 6, 7]}
    reply["choices"] = [other, reply["choices"][0]]
    assert recorded({"n": 2}, reply).response_ids == [7, 8]


@pytest.mark.parametrize("odd", [[], 5, [{"index": 0, "token_ids": "x"}], [None], {"a": 1}])
def test_an_answer_of_another_shape_is_passed_on_and_says_it_was_not_read(odd: Any) -> None:
    raw = orjson.dumps({"choices": odd, "usage": 3})
    capture = ChatCapture({}, {})
    assert capture.answer(raw) == raw
    call = capture.record(STAMP)
    assert call is not None and call.untrainable == "unreadable_answer"


def test_ids_that_do_not_add_up_to_the_usage_are_not_trained() -> None:
    assert recorded({}, answer([-0.1], ids=(7,))).untrainable == "missing_token_ids"


def test_an_answer_without_a_finish_reason_is_no_call() -> None:
    reply = answer()
    reply["choices"][0]["finish_reason"] = None
    assert recorded({}, reply) is None


def test_fields_that_need_logprobs_are_left_for_the_engine_to_refuse() -> None:
    for body in ({"top_logprobs": 2}, {"logprob_token_ids": [5]}):
        assert "logprobs" not in ChatCapture(body, {}).upstream_body()
    upstream = ChatCapture({"logprobs": True, "top_logprobs": 2}, {}).upstream_body()
    assert (upstream["logprobs"], upstream["top_logprobs"]) == (True, 2)


def test_a_null_for_top_logprobs_hides_logprobs_from_the_app_as_in_vllm_but_not_from_us() -> None:
    body: Json = {"logprobs": True, "top_logprobs": None}
    assert ChatCapture(body, {}).upstream_body()["top_logprobs"] == 0
    assert shown_to(body)["choices"][0]["logprobs"] is None
    assert recorded(body).untrainable is None


SILENT: Json = {"include_reasoning": False}


def test_hidden_reasoning_is_asked_for_and_hidden_by_us_as_vllm_hides_it() -> None:
    assert ChatCapture(SILENT, {}).upstream_body()["include_reasoning"] is True
    reply = answer()
    reply["choices"][0]["message"]["reasoning"] = "hm"
    assert shown_to(SILENT, reply)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hi",
        "reasoning": None,
    }
    assert recorded(SILENT, reply).untrainable is None


@pytest.mark.parametrize("asked", [{"logprobs": True}, {"return_token_ids": True}, {"top_p": 0.5}])
def test_reasoning_is_left_to_the_engine_where_hiding_it_would_show_more_or_train_nothing(
    asked: Json,
) -> None:
    assert ChatCapture(SILENT | asked, {}).upstream_body()["include_reasoning"] is False
