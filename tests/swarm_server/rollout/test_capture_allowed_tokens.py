"""Capture of allowed tokens from an engine that reports them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from swarm_server.samples import call as sample_call

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.rollout.capture.completion_tokens import CompletionsCapture
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.token_masks import TokenMasks, packed
from fakevllm_server.types.weight_versions import CallStamp

Json = dict[str, Any]
CAPTURES: list[type[CallCapture]] = [ChatCapture, CompletionsCapture]
PAIR, ONE, ALL = packed(bytes([0b11, 0b1])), packed(bytes([0, 0b1])), None
"""Ids 0, 1 and 8; id 8 alone."""
SHAPED: Json = {"response_format": {"type": "json_object"}}


def reported(*packed_sets: bytes | None) -> Json:
    return TokenMasks.from_packed_sets(packed_sets).to_wire()


def answer(allowed: Any, ids: tuple[int, ...] = (1, 8)) -> Json:
    logprobs = [-0.1] * len(ids)
    choice: Json = {
        "index": 0,
        "logprobs": {
            "content": [{"logprob": logprob} for logprob in logprobs],
            "token_logprobs": logprobs,
        },
        "finish_reason": "stop",
        "token_ids": list(ids),
        "prompt_token_ids": [1, 2],
    }
    choice |= {} if allowed is None else {"allowed_tokens": allowed}
    usage = {"completion_tokens": len(ids)}
    return {"choices": [choice], "usage": usage, "prompt_token_ids": [1, 2]}


def recorded(
    reply: Json, body: Json = SHAPED, kind: type[CallCapture] = ChatCapture
) -> RecordedCall:
    capture = kind(body, {}, reports_allowed=True)
    shown = orjson.loads(capture.answer(orjson.dumps(reply)))
    assert "allowed_tokens" not in shown["choices"][0]
    record = capture.record(CallStamp([0]))
    assert record is not None
    return record


@pytest.mark.parametrize("kind", CAPTURES)
def test_allowed_tokens_are_requested_only_if_the_engine_reports_them_and_sampling_excludes_tokens(
    kind: type[CallCapture],
) -> None:
    def requested(body: Json, *, reports_allowed: bool, defaults: Json | None = None) -> bool:
        capture = kind(body, defaults or {}, reports_allowed=reports_allowed)
        return "return_allowed_tokens" in capture.upstream_body()

    assert requested(SHAPED, reports_allowed=True)
    assert requested({}, reports_allowed=True, defaults={"top_k": 20})
    assert not requested(SHAPED, reports_allowed=False)
    assert not requested({"temperature": 0.7}, reports_allowed=True)
    assert not requested(SHAPED | {"presence_penalty": 1}, reports_allowed=True)


@pytest.mark.parametrize("kind", CAPTURES)
def test_allowed_tokens_are_recorded_and_hidden_from_the_app(kind: type[CallCapture]) -> None:
    call = recorded(answer(reported(PAIR, ALL)), kind=kind)
    assert call.untrainable is None
    assert call.allowed == TokenMasks.from_packed_sets([PAIR, ALL])
    assert call.num_trained == 2


@pytest.mark.parametrize("kind", CAPTURES)
def test_a_stream_reports_allowed_tokens_in_its_last_chunk(kind: type[CallCapture]) -> None:
    capture = kind(SHAPED | {"stream": True}, {}, reports_allowed=True)
    first, last = answer(None, (1,)), answer(reported(PAIR, ONE), (8,))
    first["choices"][0]["finish_reason"] = None
    last["usage"]["completion_tokens"] = 2
    shown = b"".join(capture.event(event) for event in (encode(first), encode(last), DONE))
    assert b"allowed_tokens" not in shown
    call = capture.record(CallStamp([0]))
    assert call is not None and call.untrainable is None
    assert call.allowed == TokenMasks.from_packed_sets([PAIR, ONE]) and call.num_trained == 1


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        reported(PAIR),
        reported(PAIR, PAIR, PAIR),
        reported(ONE, ALL),
        reported(ALL, packed(b"\3")),
        {"sets": ["?"], "of_token": ""},
        [],
        7,
    ],
)
def test_a_call_with_a_token_outside_its_reported_set_is_untrainable(allowed: Any) -> None:
    assert recorded(answer(allowed)).untrainable == "missing_allowed_tokens"


def test_a_call_with_only_forced_tokens_is_untrainable() -> None:
    assert recorded(answer(reported(ONE, ONE), (8, 8))).untrainable == "nothing_to_choose"


def test_allowed_tokens_that_were_not_requested_are_ignored() -> None:
    call = recorded(answer({"sets": 7}), body={})
    assert (call.untrainable, call.allowed) == (None, None)


def test_allowed_tokens_are_not_sent_to_the_proxy() -> None:
    wire = recorded(answer(reported(PAIR, ALL))).to_wire()
    assert wire.model_fields_set == sample_call().to_wire().model_fields_set
