import orjson
import pytest

from fakevllm_adapters.errors import Json, WireError
from fakevllm_adapters.vllm_chat import check_length, parse_chat_request

ASKED: Json = {"messages": [{"role": "user", "content": "hi"}]}


def refused(body: object) -> Json:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(WireError) as refusal:
        parse_chat_request(raw)
    assert refusal.value.status == 400
    return refusal.value.body["error"]


def test_loose_input_is_accepted_as_vllm_accepts_it() -> None:
    loose = {
        "messages": [{"role": "bogus", "content": None}],
        "frobnicate": 1,
        "functions": [],
        "user": "me",
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "seed": None,
    }
    assert parse_chat_request(orjson.dumps(loose)).limit == 6


REFUSALS: list[tuple[object, str]] = [
    (
        b"{",
        "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1', "
        "'msg': 'JSON decode error', 'input': '<dict of 0 items>', "
        "'ctx': {'error': 'Expecting property name enclosed in double quotes'}}",
    ),
    (
        {"model": "x"},
        "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', "
        "'msg': 'Field required', 'input': '<dict of 1 items>'}",
    ),
    (
        ASKED | {"max_tokens": "x"},
        "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', "
        "'msg': 'Input should be a valid integer, unable to parse string as an integer', "
        "'input': 'x'}",
    ),
    (
        {"messages": []},
        "Cannot apply chat template to an empty conversation. Provide at least one message.",
    ),
    (
        ASKED | {"temperature": -1},
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
    ),
    (ASKED | {"top_p": 2.0}, "top_p must be in (0, 1], got 2.0. (parameter=top_p, value=2.0)"),
    (ASKED | {"n": 0}, "n must be at least 1, got 0."),
    (
        ASKED | {"n": 3, "temperature": 0},
        "n must be 1 when using greedy sampling, got 3.",
    ),
    (
        ASKED | {"max_tokens": 0},
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    ),
    (
        ASKED | {"stream_options": {}},
        "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
    ),
    (
        ASKED | {"tool_choice": "auto"},
        "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
    ),
    (
        ASKED | {"logprobs": True, "top_logprobs": -1},
        "`top_logprobs` must be a positive value. (parameter=top_logprobs, value=-1)",
    ),
    (
        ASKED | {"logprobs": True, "top_logprobs": 21},
        "Requested sample logprobs of 21, which is greater than max allowed: 20",
    ),
    (
        ASKED | {"logprobs": False, "top_logprobs": 2},
        "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
    ),
]


@pytest.mark.parametrize(("raw", "message"), REFUSALS)
def test_refusals_are_worded_as_vllm_words_them(raw: object, message: str) -> None:
    assert refused(raw)["message"] == message


UNSUPPORTED: list[tuple[Json, str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{}], "tool_choice": "required"}, "tool_choice"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"stop_token_ids": [5]}, "stop_token_ids"),
    ({"use_beam_search": True}, "use_beam_search"),
]


@pytest.mark.parametrize(("fields", "name"), UNSUPPORTED)
def test_what_the_engine_cannot_do_is_refused_by_name(fields: Json, name: str) -> None:
    error = refused(ASKED | fields)
    assert error["param"] == name and f"`{name}` is not supported" in error["message"]


def test_a_large_wrong_value_is_not_echoed_back() -> None:
    assert len(refused({"messages": "x" * 100_000})["message"]) < 1000


def test_a_prompt_that_fills_the_context_is_refused_and_a_long_answer_is_clipped() -> None:
    with pytest.raises(
        WireError, match=r"maximum context length is 256 tokens.*at least 257 input"
    ):
        check_length(257, None, 256)
    with pytest.raises(
        WireError, match=r"max_tokens=1000 cannot be greater than max_model_len=256"
    ):
        check_length(10, 1000, 256)
    assert check_length(200, 100, 256) == 56
    assert check_length(10, None, 256) == 246
