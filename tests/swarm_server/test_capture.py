from typing import Any

import pytest

from fakevllm_adapters.sse import DONE, encode, json_of
from fakevllm_server.capture import Capture

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


def recorded(body: Json, reply: Json | None = None, defaults: Json | None = None) -> Any:
    capture = Capture(body, defaults or {})
    capture.answer(reply or answer())
    return capture.record(version=9)


def test_ids_logprobs_and_version_are_the_engines_own() -> None:
    call = recorded({"messages": []})
    assert (call.prompt_ids, call.response_ids, call.logprobs) == ([1, 2], [7, 8], [-0.1, -0.2])
    assert (call.version, call.untrainable) == (3, None)


def test_what_the_app_did_not_ask_for_is_null_again() -> None:
    shown = Capture({"messages": []}, {}).answer(answer())
    choice = shown["choices"][0]
    assert (choice["logprobs"], choice["token_ids"], choice["weight_versions"]) == (
        None,
        None,
        None,
    )
    assert shown["prompt_token_ids"] is None


def test_what_the_app_asked_for_stays() -> None:
    body: Json = {"messages": [], "logprobs": True, "return_token_ids": True}
    shown = Capture(body, {}).answer(answer())
    assert shown["choices"][0]["logprobs"] is not None
    assert shown["prompt_token_ids"] == [1, 2]


def test_unknown_fields_reach_the_engine() -> None:
    upstream = Capture({"messages": [], "frobnicate": 1}, {}).upstream_body()
    assert upstream["frobnicate"] == 1 and upstream["return_token_ids"] is True


def test_the_engines_confirmed_version_stands_in_where_it_tells_none() -> None:
    reply = answer()
    reply["choices"][0]["weight_versions"] = None
    assert recorded({}, reply).version == 9


@pytest.mark.parametrize(
    ("body", "defaults", "reason"),
    [
        ({"temperature": 0}, {}, "sampling_not_trainable: temperature 0"),
        ({"top_p": 0.9}, {}, "sampling_not_trainable: top_p"),
        ({}, {"top_k": 20}, "sampling_not_trainable: top_k"),
        ({"logit_bias": {"5": 1}}, {}, "sampling_not_trainable: logit_bias"),
        ({"tool_choice": "required"}, {}, "sampling_not_trainable: tool_choice"),
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
    assert recorded({}, answer(logprobs)).untrainable == "missing_logprob"


def test_ids_that_do_not_add_up_to_the_usage_are_not_trained() -> None:
    assert recorded({}, answer([-0.1], ids=(7,))).untrainable == "missing_token_ids"


def test_an_answer_without_a_finish_reason_is_no_call() -> None:
    reply = answer()
    reply["choices"][0]["finish_reason"] = None
    assert recorded({}, reply) is None


def chunk(delta: Json, ids: list[int] | None, finish: str | None = None) -> bytes:
    logprobs = {"content": [{"logprob": -0.5}] * len(ids)} if ids else None
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish,
        "token_ids": ids,
    }
    return encode({"choices": [choice]})


def test_a_stream_gives_the_same_record_and_no_trace_of_our_asking() -> None:
    capture = Capture({"stream": True}, {})
    events = [
        encode(
            {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2]}
        ),
        chunk({"content": "h"}, [7]),
        chunk({}, [9]),  # a token the engine's parser swallowed
        chunk({}, [8], finish="stop"),
        DONE,
    ]
    shown = [capture.event(event) for event in events]
    call = capture.record(version=0)
    assert call is not None
    assert (list(call.prompt_ids), list(call.response_ids), call.logprobs) == (
        [1, 2],
        [7, 9, 8],
        [-0.5] * 3,
    )
    assert shown[2] is None and shown[4] == DONE
    first, last = json_of(shown[0] or b""), json_of(shown[3] or b"")
    assert first is not None and first["prompt_token_ids"] is None
    assert last is not None and last["choices"][0]["token_ids"] is None


def test_an_app_that_asks_for_ids_sees_the_swallowed_tokens() -> None:
    capture = Capture({"stream": True, "return_token_ids": True}, {})
    assert capture.event(chunk({}, [9])) is not None
