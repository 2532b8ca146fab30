"""Record the tokens of chat completions for training. If the app does not want to see the model's
reasoning, the reasoning is removed from the answer after the tokens were recorded.

The module does no I/O.
"""

from __future__ import annotations

from typing import Any

from fakevllm_server.rollout.capture.base import CallCapture, Json
from fakevllm_server.rollout.capture.token_event import TokenEventReader


class ChatCapture(CallCapture):
    """The capture of one chat completion call: it records the call's tokens for training."""

    def _begin_answer(self) -> None:
        super()._begin_answer()
        hides_reasoning = (
            self.body.get("include_reasoning") is False
            and self._hides_all
            and self._untrainable_sampling is None
        )
        self._hidden_reasoning = HiddenReasoning() if hides_reasoning else None
        if self._hides_all and self._hidden_reasoning is None:
            self._token_events = TokenEventReader()

    def upstream_body(self) -> Json:
        body = super().upstream_body()
        if self._hidden_reasoning is not None:
            body["include_reasoning"] = True  # see HiddenReasoning
        return body

    def _app_gets_no_logprobs(self, body: Json) -> bool:
        # vLLM prints no logprobs if the app sets `top_logprobs` to null.
        return not body.get("logprobs") or body.get("top_logprobs", 0) is None

    def _request_logprobs(self, body: Json) -> None:
        if not _needs_own_logprobs(body):
            body["logprobs"] = True
            body["top_logprobs"] = body.get("top_logprobs") or 0

    def _logprobs_in(self, choice: Json) -> list[Any]:
        logprobs: Json = choice.get("logprobs") or {}
        content: list[Json] = logprobs.get("content") or []
        return [entry.get("logprob") for entry in content]

    def _hide(self, choice: Json) -> None:
        super()._hide(choice)
        if self._hidden_reasoning is not None:
            self._hidden_reasoning.hide(choice)

    def _is_extra_choice(self, choice: Json) -> bool:
        """Return True if this choice of a stream chunk is empty, and was sent only because the
        server requested token ids and logprobs for training.

        vLLM's parsers remove some tokens from the text. For such a token, vLLM sends an empty delta
        if token ids or logprobs are requested, and nothing otherwise.
        """
        is_empty = choice.get("delta") == {} and choice.get("finish_reason") is None
        return is_empty and self._hides_all


def _needs_own_logprobs(body: Json) -> bool:
    """Return True if vLLM refuses the body because `logprobs` is missing. This happens if the body
    has `top_logprobs` or `logprob_token_ids`. The app must get this refusal, so the server does not
    add `logprobs` to such a body."""
    return not body.get("logprobs") and bool(
        body.get("top_logprobs") or body.get("logprob_token_ids")
    )


_REASONING_FIELDS = ("reasoning", "reasoning_content")
"""Names of the field with the reasoning: vLLM's current name, and the name before vLLM 0.16."""


class HiddenReasoning:
    """Removes the model's reasoning from one answer, streamed or not, in the same way as vLLM does.

    If an app sends `include_reasoning: false`, vLLM leaves out the reasoning, and also its token
    ids and logprobs. Training needs these ids and logprobs. Therefore the server requests the
    reasoning from vLLM, and this class removes it before the app gets the answer.
    """

    def __init__(self) -> None:
        self._has_reasoning = False

    def hide(self, choice: Json) -> None:
        """Remove the model's reasoning from `choice`, which is one choice of a complete answer or
        of a stream chunk."""
        message: Json = choice.get("message") or {}
        for name in _REASONING_FIELDS:
            if name in message:
                message[name] = None
        delta: Json = choice.get("delta") or {}
        # An empty text counts too: only a parser for reasoning writes the field at all.
        self._has_reasoning = self._has_reasoning or any(
            delta.get(name) is not None for name in _REASONING_FIELDS
        )
        if self._has_reasoning and "role" not in delta:
            choice["delta"] = _without_reasoning(delta)


def _without_reasoning(delta: Json) -> Json:
    """Return a stream's delta as vLLM's reasoning parsers would send it with `include_reasoning:
    false`.

    The field `reasoning` is set to null. If the delta has no content and no tool calls, return {}.

    >>> _without_reasoning({"reasoning": "hm"})
    {}
    >>> _without_reasoning({"reasoning": "hm", "content": "Hi"})
    {'content': 'Hi', 'reasoning': None}
    """
    if not (delta.get("content") or delta.get("tool_calls")):
        return {}
    ordered: Json = {}
    for name in ("content", "reasoning", "tool_calls"):
        if name == "reasoning":
            ordered[name] = None
        elif name in delta:
            ordered[name] = delta[name]
    others = {
        name: value for name, value in delta.items() if name not in (*ordered, *_REASONING_FIELDS)
    }
    return ordered | others
