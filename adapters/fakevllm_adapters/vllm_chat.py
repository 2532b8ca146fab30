"""/v1/chat/completions from the engine's side: vLLM's request schema and its refusals.

Used by the engines that are not vLLM themselves.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from fakevllm_adapters.errors import (
    WireError,
    bad_json,
    bad_request,
    not_supported,
    schema_error,
)

MAX_STOP_STRINGS = 4
MAX_N = 16384
MAX_TOP_LOGPROBS = 20
"""vLLM's default of --max-logprobs."""


class ChatRequest(BaseModel):
    """The fields our own engines honour; the others are accepted as vLLM accepts them, or refused
    by name."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    request_id: str | None = None

    @property
    def limit(self) -> int | None:
        """Asked-for number of new tokens."""
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def parse_chat_request(raw: bytes) -> ChatRequest:
    """Raises WireError, worded as vLLM words it."""
    body = _loads(raw)
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise schema_error([dict(problem) for problem in error.errors(include_url=False)]) from None
    _check_meaning(request)
    _check_supported(request)
    return request


def _loads(raw: bytes) -> Any:
    """What orjson refuses (NaN, half surrogates, endless nesting) is refused everywhere alike."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    try:  # the standard library words its complaints as vLLM shows them
        json.loads(raw)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except UnicodeDecodeError:
        position, reason = 0, "Invalid UTF-8"
    except RecursionError:
        pass  # ours says it
    raise bad_json(position, reason)


def _check_meaning(request: ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            "stream_options",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request(
            "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
            "top_logprobs",
        )
    if request.tools == []:
        raise bad_request(
            "`tools` must not be an empty array. Either provide at least one tool or omit the "
            "field entirely. (parameter=tools)",
            "tools",
        )
    if request.tool_choice not in (None, "none") and not request.tools:
        raise bad_request(
            "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)", "tool_choice"
        )
    if isinstance(request.tool_choice, str) and request.tool_choice not in (
        "none",
        "auto",
        "required",
    ):
        raise bad_request(
            f"Invalid value for `tool_choice`: {request.tool_choice}! Only named tools, "
            '"none", "auto" or "required" are supported. (parameter=tool_choice)',
            "tool_choice",
        )
    if request.chat_template is not None:
        raise bad_request(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    if not request.messages:
        raise bad_request(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    _check_ranges(request)


def _check_ranges(request: ChatRequest) -> None:
    n = 1 if request.n is None else request.n
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > MAX_N:
        raise bad_request(
            f"n must be at most {MAX_N}, got {n}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    if n > 1 and request.temperature == 0:
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
    if request.temperature is not None and request.temperature < 0:
        raise _out_of_range(
            "temperature", f"temperature must be non-negative, got {request.temperature}.", request
        )
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise _out_of_range("top_p", f"top_p must be in (0, 1], got {request.top_p}.", request)
    if request.top_k is not None and request.top_k < -1:
        raise _out_of_range(
            "top_k", f"top_k must be 0 (disable), or at least 1, got {request.top_k}.", request
        )
    if request.min_p is not None and not 0 <= request.min_p <= 1:
        raise _out_of_range("min_p", f"min_p must be in [0, 1], got {request.min_p}.", request)
    if request.top_logprobs is not None and request.top_logprobs < 0:
        raise _out_of_range("top_logprobs", "`top_logprobs` must be a positive value.", request)
    if request.top_logprobs is not None and request.top_logprobs > MAX_TOP_LOGPROBS:
        raise bad_request(
            f"Requested sample logprobs of {request.top_logprobs}, which is greater than max "
            f"allowed: {MAX_TOP_LOGPROBS}"
        )
    if request.limit is not None and request.limit < 1:
        raise bad_request(
            f"max_tokens must be at least 1, got {request.limit}.", "max_tokens", request.limit
        )
    if len(request.stops) > MAX_STOP_STRINGS:
        raise bad_request(
            f"stop must have at most {MAX_STOP_STRINGS} entries, got {len(request.stops)}.", "stop"
        )


def _out_of_range(name: str, message: str, request: ChatRequest) -> WireError:
    return bad_request(message, name, getattr(request, name))


_UNSUPPORTED = (
    "structured_outputs",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "stop_token_ids",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "use_beam_search",
    "echo",
    "continue_final_message",
    "logits_processors",
)


def _check_supported(request: ChatRequest) -> None:
    """What these engines cannot honour yet, refused by name."""
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise not_supported("response_format")
    if request.tool_choice == "required" or isinstance(request.tool_choice, dict):
        raise not_supported("tool_choice")
    for name, neutral in (
        ("frequency_penalty", 0),
        ("presence_penalty", 0),
        ("repetition_penalty", 1),
    ):
        if getattr(request, name) not in (None, neutral):
            raise not_supported(name)
    if request.logit_bias:
        raise not_supported("logit_bias")
    for name in _UNSUPPORTED:
        if getattr(request, name, None):
            raise not_supported(name)


def check_length(prompt_tokens: int, limit: int | None, max_model_len: int) -> int:
    """How many tokens may be generated. Raises WireError where vLLM answers 400."""
    if prompt_tokens >= max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains at least {prompt_tokens} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    if limit is not None and limit > max_model_len:
        raise bad_request(
            f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            limit,
        )
    room = max_model_len - prompt_tokens
    return room if limit is None else min(limit, room)
