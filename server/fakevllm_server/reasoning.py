"""Reasoning an app does not want to see, hidden by us. Pure.

vLLM hides it itself on `include_reasoning: false`, and hides ids and logprobs with it; so it is
asked for all, and the app is shown what vLLM would have printed.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_NAMES = ("reasoning", "reasoning_content")
"""vLLM's, and its name before 0.16."""


class HiddenReasoning:
    """Of one answer, whole or in chunks."""

    def __init__(self) -> None:
        self._seen = False

    def hide(self, choice: Json) -> None:
        message: Json = choice.get("message") or {}
        for name in _NAMES:
            if name in message:
                message[name] = None
        delta: Json = choice.get("delta") or {}
        # An empty text counts: only a parser that looks for reasoning writes it.
        self._seen = self._seen or any(delta.get(name) is not None for name in _NAMES)
        if self._seen and "role" not in delta:
            choice["delta"] = _spoken(delta)


def _spoken(delta: Json) -> Json:
    """What a parser of vLLM's leaves of it: a null for the reasoning, and nothing at all where
    nothing else is said.

    >>> _spoken({"reasoning": "hm"}), _spoken({"reasoning": "hm", "content": "Hi"})
    ({}, {'content': 'Hi', 'reasoning': None})
    """
    if not (delta.get("content") or delta.get("tool_calls")):
        return {}
    said: Json = {}
    for name in ("content", "reasoning", "tool_calls"):
        if name == "reasoning":
            said[name] = None
        elif name in delta:
            said[name] = delta[name]
    return said | {name: value for name, value in delta.items() if name not in (*said, *_NAMES)}
