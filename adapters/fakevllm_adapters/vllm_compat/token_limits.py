"""Adapt a request's token limits to the model's context, or to the job's maximum length of an
answer.

vLLM refuses a `max_tokens` that exceeds its context. For an app, `max_tokens` is only an upper
limit. Apps often send a number that is far larger than the context. Such a limit is removed, and
vLLM then generates as many tokens as the context allows. This module does no I/O.
"""

from __future__ import annotations

from fakevllm_adapters.formats.base import Json

_LIMITS = ("max_tokens", "max_completion_tokens")
COMPLETION_TOKENS = 16
"""vLLM's default of `max_tokens` for /v1/completions."""
_VLLM_OVER_CONTEXT = "maximum context length is"
"""Part of vLLM's error message when the prompt and `max_tokens` together exceed the context. The
error has status 400."""


def drop_limits_above_context(body: Json, max_model_len: int) -> Json:
    """Return a request body without the token limits that are larger than the context.

    Return the same object if no limit is too large. A completions request always keeps its limits,
    because vLLM generates only 16 tokens without a limit.

    >>> drop_limits_above_context({"messages": [], "max_tokens": 32000}, 4096)
    {'messages': []}
    """
    above = [name for name in _limits(body) if body[name] > max_model_len]
    return _without(body, above) if above else body


def cap_new_tokens(body: Json, max_new_tokens: int) -> Json:
    """Return a request body whose token limit is at most `max_new_tokens`.

    A higher limit is lowered. If a chat request has no limit, the limit `max_new_tokens` is added.
    If a completions request has no limit, the smaller of `max_new_tokens` and 16 is added, because
    vLLM's default is 16. If nothing has to change, the same object is returned. A limit that is not
    a number is kept: the engine then refuses the request.

    >>> cap_new_tokens({"messages": [], "max_tokens": 32000}, 4096)
    {'messages': [], 'max_tokens': 4096}
    >>> cap_new_tokens({"messages": []}, 4096)
    {'messages': [], 'max_tokens': 4096}
    """
    numbers = {name: _number(body[name]) for name in _LIMITS if body.get(name) is not None}
    if not numbers:
        default = max_new_tokens if "messages" in body else min(max_new_tokens, COMPLETION_TOKENS)
        return {**body, "max_tokens": default}
    above = {name: max_new_tokens for name, number in numbers.items() if number > max_new_tokens}
    return {**body, **above} if above else body


def drop_token_limits(body: Json) -> Json | None:
    """Return a request body without its token limits. Return None if the body has no limit that can
    be removed.

    The limits of a completions request are never removed, because vLLM generates only 16 tokens
    without a limit.
    """
    limits = _limits(body)
    return _without(body, limits) if limits else None


def is_over_context(status: int, body: Json) -> bool:
    """Return True if an engine's response is the error that prompt and token limit together exceed
    the context."""
    error: object = body.get("error")
    return (
        status == 400
        and isinstance(error, dict)
        and (_VLLM_OVER_CONTEXT in str(body["error"].get("message")))
    )


def _limits(body: Json) -> list[str]:
    """Return the names of the token limits that may be removed from a request body.

    The limits of a completions request may not be removed, because vLLM generates only 16 tokens
    without a limit.
    """
    if "messages" not in body:
        return []
    return [name for name in _LIMITS if isinstance(body.get(name), int)]


def _number(value: object) -> float:
    """Return the number that vLLM reads from a value, such as 8 from the string "8".

    Return 0 if vLLM would refuse the value.
    """
    try:
        return float(str(value))
    except ValueError:
        return 0.0


def _without(body: Json, names: list[str]) -> Json:
    return {name: value for name, value in body.items() if name not in names}
