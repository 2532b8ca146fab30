"""Capture of text completions: one prompt, one choice, ids and logprobs inside the choice."""

from __future__ import annotations

from typing import Any, cast

from fakevllm_server.rollout.capture.base import CallCapture, Json

_SHOWS_MORE = ("echo", "prompt_logprobs", "prompt_embeds", "suffix", "use_beam_search")
"""Fields under which an answer is not one sampled continuation of known ids."""


class CompletionsCapture(CallCapture):
    """Follows one completions call from the app's body to its record."""

    @staticmethod
    def refuses(body: Json) -> bool:
        if body.get("n") not in (None, 1) or _num_prompts(body.get("prompt")) != 1:
            return True
        asked = [body.get(name) for name in _SHOWS_MORE]
        return any(value is not None and value is not False for value in asked)  # 0 asks too

    def _hides_logprobs_of(self, body: Json) -> bool:
        return body.get("logprobs") is None  # 0 is an answer: the sampled tokens alone

    def _ask_logprobs(self, body: Json) -> None:
        # With ids of its own and no `logprobs` the engine refuses, and must be left to.
        if body.get("logprobs") is None and not body.get("logprob_token_ids"):
            body["logprobs"] = 0

    def _logprobs_in(self, choice: Json) -> list[Any]:
        logprobs: Json = choice.get("logprobs") or {}
        return logprobs.get("token_logprobs") or []

    def _exists_for_us(self, choice: Json) -> bool:
        return False  # vLLM prints a chunk for every iteration, whatever was asked


def _num_prompts(prompt: object) -> int:
    """How many answers it asks for; 0 where it is none."""
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list):
        return 0
    parts = cast(list[object], prompt)
    is_ids = bool(parts) and all(isinstance(part, int) for part in parts)
    return 1 if is_ids else len(parts)
