"""ChatCapture of chat completions; capture_base.py has what holds for every format."""

from __future__ import annotations

from typing import Any

from fakevllm_server.rollout.capture.base import CallCapture, Json


class ChatCapture(CallCapture):
    """Follows one chat call from the app's body to its record."""

    def __init__(
        self,
        body: Json,
        defaults: Json,
        refusal: str | None = None,
        *,
        reports_allowed: bool = False,
    ) -> None:
        super().__init__(body, defaults, refusal, reports_allowed=reports_allowed)
        hidden = body.get("include_reasoning") is False and self._hides_all and self._bent is None
        self._reasoning = HiddenReasoning() if hidden else None

    def upstream_body(self) -> Json:
        body = super().upstream_body()
        if self._reasoning is not None:
            body["include_reasoning"] = True  # hidden reasoning hides ids and logprobs with it
        return body

    def _hides_logprobs_of(self, body: Json) -> bool:
        # vLLM prints none where the app sets `top_logprobs` to null.
        return not body.get("logprobs") or body.get("top_logprobs", 0) is None

    def _ask_logprobs(self, body: Json) -> None:
        if not _needs_own_logprobs(body):
            body["logprobs"] = True
            body["top_logprobs"] = body.get("top_logprobs") or 0

    def _logprobs_in(self, choice: Json) -> list[Any]:
        logprobs: Json = choice.get("logprobs") or {}
        content: list[Json] = logprobs.get("content") or []
        return [entry.get("logprob") for entry in content]

    def _hide(self, choice: Json) -> None:
        super()._hide(choice)
        if self._reasoning is not None:
            self._reasoning.hide(choice)

    def _exists_for_us(self, choice: Json) -> bool:
        """A token the engine's parser swallowed shows up as an empty delta only where ids or
        logprobs were asked."""
        is_empty = choice.get("delta") == {} and choice.get("finish_reason") is None
        return is_empty and self._hides_all


def _needs_own_logprobs(body: Json) -> bool:
    """Fields the engine refuses without `logprobs`, and must be left to refuse."""
    return not body.get("logprobs") and bool(
        body.get("top_logprobs") or body.get("logprob_token_ids")
    )


# Reasoning an app does not want to see, hidden by us. Pure.
#
# vLLM hides it itself on `include_reasoning: false`, and hides ids and logprobs with it; so it is
# asked for all, and the app is shown what vLLM would have printed.

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
