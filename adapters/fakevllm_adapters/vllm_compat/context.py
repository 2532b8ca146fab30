"""Ceilings of what a chat request asks for: the context's length, the job's of an answer. Pure.

vLLM refuses a request for more tokens than its context holds. Apps mean the number as a ceiling and
send one far above, so it is taken out: without one vLLM gives what room is left.
"""

from __future__ import annotations

from fakevllm_adapters.formats.base import Json

_LIMITS = ("max_tokens", "max_completion_tokens")
COMPLETION_TOKENS = 16
"""vLLM's limit of a completion that names none."""
_VLLM_OVER_CONTEXT = "maximum context length is"
"""Part of the message of vLLM's 400 for a prompt and a limit that are too long together; vLLM's
serving layer writes it."""


def within_context(body: Json, max_model_len: int) -> Json:
    """The body without a limit that no prompt could leave room for; the same object where it has
    none.

    >>> within_context({"messages": [], "max_tokens": 32000}, 4096)
    {'messages': []}
    """
    above = [name for name in _limits(body) if body[name] > max_model_len]
    return _without(body, above) if above else body


def bounded(body: Json, most_tokens: int) -> Json:
    """The body with that limit, where it has none or a higher one; the same object where it has
    one of its own. What is no number is the engine's to refuse.

    >>> bounded({"messages": [], "max_tokens": 32000}, 4096)
    {'messages': [], 'max_tokens': 4096}
    >>> bounded({"messages": []}, 4096)
    {'messages': [], 'max_tokens': 4096}
    """
    asked = {name: _number(body[name]) for name in _LIMITS if body.get(name) is not None}
    if not asked:
        default = most_tokens if "messages" in body else min(most_tokens, COMPLETION_TOKENS)
        return {**body, "max_tokens": default}
    above = {name: most_tokens for name, number in asked.items() if number > most_tokens}
    return {**body, **above} if above else body


def unlimited(body: Json) -> Json | None:
    """The body without its limit, None where it has none."""
    limits = _limits(body)
    return _without(body, limits) if limits else None


def is_over_context(status: int, body: Json) -> bool:
    """Whether an engine's refusal says that prompt and limit together are too long."""
    error: object = body.get("error")
    return (
        status == 400
        and isinstance(error, dict)
        and (_VLLM_OVER_CONTEXT in str(body["error"].get("message")))
    )


def _limits(body: Json) -> list[str]:
    """Of a chat: a completion without one has vLLM's default of 16 tokens."""
    if "messages" not in body:
        return []
    return [name for name in _LIMITS if isinstance(body.get(name), int)]


def _number(value: object) -> float:
    """As an engine reads it, which takes `"8"` and `8.0` too; 0 for what it will refuse."""
    try:
        return float(str(value))
    except ValueError:
        return 0.0


def _without(body: Json, names: list[str]) -> Json:
    return {name: value for name, value in body.items() if name not in names}
