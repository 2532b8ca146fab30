"""Capture (record for training) the tokens of text completions with one prompt and one choice.
Other completions are not captured. In the engine's answer, the choice contains the token ids and
the logprobs."""

from __future__ import annotations

from typing import Any, cast

from fakevllm_server.rollout.capture.base import CallCapture, Json

_UNCAPTURED_FIELDS = ("echo", "prompt_logprobs", "prompt_embeds", "suffix", "use_beam_search")
"""Request fields with which a call is not captured, because the answer is not one sampled
continuation of known token ids."""


class CompletionsCapture(CallCapture):
    """Recorder of one call of /v1/completions. It adds fields to the request for the engine, and
    records the tokens in the answer."""

    @staticmethod
    def cannot_capture(body: Json) -> bool:
        if body.get("n") not in (None, 1) or _num_prompts(body.get("prompt")) != 1:
            return True
        values = [body.get(name) for name in _UNCAPTURED_FIELDS]
        # 0 counts as set: `prompt_logprobs` 0 is a request for prompt logprobs.
        return any(value is not None and value is not False for value in values)

    def _app_gets_no_logprobs(self, body: Json) -> bool:
        return body.get("logprobs") is None  # 0 requests the logprobs of the sampled tokens

    def _request_logprobs(self, body: Json) -> None:
        # vLLM refuses `logprob_token_ids` without `logprobs`. The app must get this refusal.
        if body.get("logprobs") is None and not body.get("logprob_token_ids"):
            body["logprobs"] = 0

    def _logprobs_in(self, choice: Json) -> list[Any]:
        logprobs: Json = choice.get("logprobs") or {}
        return logprobs.get("token_logprobs") or []

    def _is_extra_choice(self, choice: Json) -> bool:
        return False  # vLLM prints a chunk for each iteration, whatever was requested


def _num_prompts(prompt: object) -> int:
    """Return the number of prompts in the request field `prompt`. Return 0 if the field is neither
    a string nor a list."""
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list):
        return 0
    parts = cast(list[object], prompt)
    is_ids = bool(parts) and all(isinstance(part, int) for part in parts)
    return 1 if is_ids else len(parts)
