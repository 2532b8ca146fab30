"""The context's length as a ceiling. Pure."""

from __future__ import annotations

from fakevllm_adapters.base import Json

_LIMITS = ("max_tokens", "max_completion_tokens")


def within_context(body: Json, max_model_len: int) -> Json:
    """The body with no more tokens asked for than the engine's context holds; the same object
    where it asks for less. vLLM refuses such a request; apps mean it as a ceiling and send numbers
    far above.

    >>> within_context({"max_tokens": 32000, "n": 1}, 4096)
    {'max_tokens': 4096, 'n': 1}
    """
    above: Json = {
        name: max_model_len
        for name in _LIMITS
        if isinstance(body.get(name), int) and body[name] > max_model_len
    }
    return body | above if above else body
