"""Checks of a chat request that go beyond the types of its fields.

Invalid values and invalid combinations are refused with vLLM's own message. Some fields are
supported by none of this project's engines. Such a field is refused with a message that names the
field.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, cast

from fakevllm_adapters.protocol.errors import Json, WireError, bad_request, not_supported

if TYPE_CHECKING:
    from fakevllm_adapters.vllm_compat.chat_request import ChatRequest

MAX_STOP_STRINGS = 4
MAX_N = 16384
MAX_TOP_LOGPROBS = 20
"""Maximum value of `top_logprobs`, which is vLLM's default of --max-logprobs."""
MAX_PENALTY = 2.0
MAX_TEMPERATURE = 2.0

MAX_TOKEN_IDS = 2**21
"""Maximum number of token ids in a prompt or in a request to `/detokenize`. It is larger than any
context. Without a limit, validating a body of 32 MiB with ids would block the engine's event loop
for five seconds."""
_MAX_ENTRIES = {
    "stop_token_ids": 1024,
    "bad_words": 4096,
    "tools": 4096,
    "allowed_token_ids": 2**20,
    "logit_bias": 2**20,
}
"""Maximum number of entries in a field. vLLM has no such limits, but more entries would slow down
the sampling of all requests. The limits of the last two fields allow an entry for each token of a
vocabulary."""

_TOOL_CHOICES = ("none", "auto", "required")
_NAMED_USAGE = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'

_UNSUPPORTED = (
    "use_beam_search",
    "echo",
    "logits_processors",
    "logprob_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "watermarking",
    "kv_transfer_params",
    "ec_transfer_params",
)
"""Fields of vLLM that no bundled engine supports. A request with such a field is accepted only if
the field's value is null, false or empty."""


def check_num_token_ids(name: str, value: object) -> None:
    """Raise WireError (400) if `value` has more than MAX_TOKEN_IDS token ids. `value` may be a list
    or a list of lists. `name` is the field's name."""
    if not isinstance(value, list):
        return
    parts = cast(list[Any], value)
    num = len(parts) + sum(len(cast(Sized, part)) for part in parts if isinstance(part, list))
    if num > MAX_TOKEN_IDS:
        raise bad_request(f"`{name}` must have at most {MAX_TOKEN_IDS} token ids.", name, num)


def check_before_types(body: Json) -> None:
    """Run vLLM's first checks of a chat request, which come before the validation of the fields'
    types.

    Raises WireError (400) if a check fails.
    """
    check_num_entries(body)
    format: object = body.get("response_format")
    if isinstance(format, dict):
        shape = cast(Json, format)
        if shape.get("type") == "json_schema" and shape.get("json_schema") is None:
            raise _refused(
                "When response_format type is 'json_schema', the 'json_schema' field must be "
                "provided.",
                "response_format",
            )
    _check_streaming(body)
    for name in ("prompt_logprobs", "top_logprobs"):
        if body.get(name) is not None and not isinstance(body[name], int | float):
            raise bad_request(f"`{name}` must be an integer.", name, body[name])
    _check_tools(body)
    check_continuation(body)
    salt: object = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise _refused(
            "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"
        )


def check_num_entries(body: Json) -> None:
    """Raise WireError (400) if a field of the chat request has more entries than `_MAX_ENTRIES`
    allows."""
    for name, most in _MAX_ENTRIES.items():
        value: object = body.get(name)
        if isinstance(value, (list, dict)) and len(cast(Sized, value)) > most:
            num = len(cast(Sized, value))
            raise bad_request(f"`{name}` must have at most {most} entries.", name, num)


def _check_streaming(body: Json) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise _refused("Stream options can only be defined when `stream=True`.", "stream_options")
    num: object = body.get("prompt_logprobs")
    if body.get("stream") and isinstance(num, int) and (num > 0 or num == -1):
        raise _refused("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def _check_tools(body: Json) -> None:
    if body.get("tools") == []:
        raise _refused(
            "`tools` must not be an empty array. Either provide at least one tool or omit the "
            "field entirely.",
            "tools",
        )
    choice: Any = body.get("tool_choice")
    if choice in (None, "none"):
        return
    if body.get("tools") is None:
        raise _refused("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        _check_named_tool(cast(Json, choice), body["tools"])
    elif choice not in _TOOL_CHOICES:
        raise _refused(
            f"Invalid value for `tool_choice`: {str(choice)[:200]}! Only named tools, "
            '"none", "auto" or "required" are supported.',
            "tool_choice",
        )


def _check_named_tool(choice: Json, tools: object) -> None:
    value: Any = choice.get("function")
    path = "tool_choice.function"
    if not isinstance(value, dict):
        raise _refused(
            f"Invalid value for `function`: `{str(value)[:200]}` in `tool_choice`! {_NAMED_USAGE}",
            path,
        )
    function = cast(Json, value)
    if "name" not in function:
        raise _refused(
            f"Expected field `name` in `function` in `tool_choice`! {_NAMED_USAGE}",
            f"{path}.name",
        )
    name: Any = function["name"]
    if not isinstance(name, str) or not name:
        raise _refused(
            f"Invalid `name` in `function`: `{str(name)[:200]}` in `tool_choice`! {_NAMED_USAGE}",
            f"{path}.name",
        )
    # If `tools` is not a list, the validation of types reports that next.
    if isinstance(tools, list) and name not in map(_tool_name, cast(list[Any], tools)):
        raise _refused(
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
            "tool_choice",
        )


def _tool_name(tool: Any) -> object:
    function: Any = cast(Json, tool).get("function") if isinstance(tool, dict) else None
    return cast(Json, function).get("name") if isinstance(function, dict) else None


def check_continuation(body: Json) -> None:
    """Raise WireError (400) if a chat request asks for two things that exclude each other. The
    model cannot both continue the last message and begin a new one after a generation prompt."""
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise bad_request(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )


def check_conversation(request: ChatRequest) -> None:
    """Raise WireError (400) if the request has no messages, or if it has a chat template of its
    own."""
    if request.chat_template is not None:
        raise bad_request(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    if not request.messages:
        raise bad_request(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )


def check(request: ChatRequest) -> None:
    """Check the values of a chat request whose fields have valid types.

    Raises WireError (400) for an invalid value, and for a field that no engine of this project
    supports.
    """
    check_conversation(request)
    _check_sampling(request)
    _check_logprobs(request)
    _check_grammar(request)
    for name in _UNSUPPORTED:
        if getattr(request, name, None):
            raise not_supported(name)
    if getattr(request, "prompt_logprobs", None) is not None:
        raise not_supported("prompt_logprobs")


def _check_sampling(request: ChatRequest) -> None:
    n = 1 if request.n is None else request.n
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > MAX_N:
        raise bad_request(
            f"n must be at most {MAX_N}, got {n}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    _check_penalties(request)
    temperature = request.temperature
    if temperature is not None and temperature < 0:
        raise bad_request(
            f"temperature must be non-negative, got {temperature}.", "temperature", temperature
        )
    if temperature is not None and temperature > MAX_TEMPERATURE:
        raise bad_request(
            f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature
        )
    _check_truncations(request)
    if n > 1 and temperature == 0:
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
    if request.max_new_tokens is not None and request.max_new_tokens < 1:
        raise bad_request(
            f"max_tokens must be at least 1, got {request.max_new_tokens}.",
            "max_tokens",
            request.max_new_tokens,
        )
    if any(not stop for stop in request.stops):
        raise bad_request("stop cannot contain an empty string.")
    if any(not word for word in request.bad_words or ()):
        raise bad_request(
            f"bad_words cannot contain an empty string. Got bad_words={request.bad_words}"
        )
    if request.truncation_side not in (None, "left", "right"):
        raise bad_request(
            "`truncation_side` must be either 'left' or 'right'.",
            "truncation_side",
            request.truncation_side,
        )


def _check_penalties(request: ChatRequest) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        penalty: float | None = getattr(request, name)
        if penalty is not None and not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise bad_request(f"{name} must be in [-2, 2], got {penalty}.")
    repetition = request.repetition_penalty
    if repetition is not None and repetition <= 0:
        raise bad_request(f"repetition_penalty must be greater than zero, got {repetition}.")
    wrong = [key for key in request.logit_bias or {} if not _is_token_id(key)]
    if wrong:
        raise bad_request(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}",
            "logit_bias",
            wrong,
        )
    if request.min_tokens is not None and request.min_tokens < 0:
        raise bad_request(
            f"min_tokens must be greater than or equal to 0, got {request.min_tokens}."
        )


def _is_token_id(key: str) -> bool:
    try:
        int(key)
    except ValueError:
        return False
    return True


def _check_truncations(request: ChatRequest) -> None:
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise bad_request(f"top_p must be in (0, 1], got {request.top_p}.", "top_p", request.top_p)
    if request.top_k is not None and request.top_k < -1:
        raise bad_request(f"top_k must be 0 (disable), or at least 1, got {request.top_k}.")
    if request.min_p is not None and not 0 <= request.min_p <= 1:
        raise bad_request(f"min_p must be in [0, 1], got {request.min_p}.")


def _check_logprobs(request: ChatRequest) -> None:
    num = request.top_logprobs
    if num is None:
        return
    if num < 0:
        raise bad_request("`top_logprobs` must be a positive value.", "top_logprobs", num)
    if num > 0 and not request.logprobs:
        raise _refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if num > MAX_TOP_LOGPROBS:
        raise bad_request(
            f"Requested sample logprobs of {num}, which is greater than max allowed: "
            f"{MAX_TOP_LOGPROBS}",
            "logprobs",
            num,
        )


def _check_grammar(request: ChatRequest) -> None:
    constraints = request.structured_outputs or {}
    kinds = [name for name in ("json", "regex", "choice") if constraints.get(name) is not None]
    if len(kinds) > 1:
        raise bad_request(
            "You can only use one kind of constraints for structured outputs "
            "('json', 'regex' or 'choice')."
        )
    if kinds and isinstance(request.tool_choice, dict):
        raise bad_request(
            "You can only either use constraints for structured outputs or tools, not both."
        )
    _ = request.grammar  # raises WireError for every other mistake


def _refused(message: str, param: str) -> WireError:
    """Return a 400 in vLLM's form. Its message names the parameter and does not repeat the
    parameter's value."""
    return bad_request(f"{message} (parameter={param})", param)
