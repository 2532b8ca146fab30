"""Capture of one LLM call: what to ask of the engine, what to keep of its answer, what the app
must not see.

The engine is asked for ids, logprobs and weight versions. What the app did not ask for itself is
set back to null,
as a plain vLLM prints it, and chunks that exist only because of our asking are dropped. Ids and
logprobs are the
engine's own; a call with a hole in them is kept but marked untrainable, never padded.
"""

from __future__ import annotations

from typing import Any

from fakevllm_adapters.sse import encode, json_of
from fakevllm_server.backends.base import used_temperature
from fakevllm_server.calls import RecordedCall, VersionSpan

Json = dict[str, Any]

_INJECTED: Json = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "structured_outputs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "n": (None, 1),
}
"""Values under which the recorded logprob is that of the whole softmax at the call's
temperature."""


class Capture:
    """Follows one call from the app's body to its record."""

    def __init__(self, body: Json, defaults: Json) -> None:
        self._body = body
        self._sampling = defaults | {key: value for key, value in body.items() if value is not None}
        self._hides_logprobs = not body.get("logprobs")
        self._hides_ids = not body.get("return_token_ids")
        self._hides_versions = not body.get("return_weight_versions")
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._finish_reason: str | None = None
        self._completion_tokens: int | None = None

    def upstream_body(self) -> Json:
        """The app's body with the capture fields; `include_reasoning` off would hide ids and
        logprobs from us."""
        return self._body | _INJECTED

    def answer(self, body: Json) -> Json:
        """Record a whole answer; returns it as the app may see it."""
        self._prompt_ids = body.get("prompt_token_ids")
        usage: Json = body.get("usage") or {}
        self._completion_tokens = usage.get("completion_tokens")
        for choice in body.get("choices", []):
            if choice.get("index", 0) == 0:
                self._take(choice)
            self._hide(choice)
        if self._hides_ids and "prompt_token_ids" in body:
            body["prompt_token_ids"] = None
        return body

    def event(self, event: bytes) -> bytes | None:
        """Record one stream event; returns it as the app may see it, None where it would not exist
        for it."""
        chunk = json_of(event)
        if chunk is None:
            return event
        usage = chunk.get("usage")
        if usage:
            self._completion_tokens = usage.get("completion_tokens")
        if chunk.get("prompt_token_ids") is not None:
            self._prompt_ids = chunk["prompt_token_ids"]
            if self._hides_ids:
                chunk["prompt_token_ids"] = None
        for choice in chunk.get("choices", []):
            if choice.get("index", 0) == 0:
                self._take(choice)
            self._hide(choice)
            if self._exists_for_us(choice):
                return None
        return encode(chunk)

    def record(self, version: int) -> RecordedCall | None:
        """The call, or None where it did not finish. `version` is what the engine last
        confirmed."""
        if self._prompt_ids is None or self._finish_reason is None:
            return None
        spans = self._spans or [VersionSpan(version, 0, len(self._ids))]
        temperature = used_temperature(float(self._sampling.get("temperature", 1.0)))
        whole = len(self._logprobs) == len(self._ids)
        return RecordedCall(
            prompt_ids=self._prompt_ids,
            response_ids=self._ids,
            logprobs=self._logprobs if whole else None,
            versions=spans,
            temperature=temperature,
            finish_reason=self._finish_reason,
            untrainable=self._untrainable(temperature),
        )

    def _untrainable(self, temperature: float) -> str | None:
        if not self._ids:
            return "empty_response"
        if len(self._logprobs) != len(self._ids) or any(map(_is_missing, self._logprobs)):
            return "missing_logprob"
        if self._completion_tokens is not None and self._completion_tokens != len(self._ids):
            return "missing_token_ids"
        if temperature == 0:
            return "sampling_not_trainable: temperature 0"
        odd = [
            name for name, neutral in _NEUTRAL.items() if self._sampling.get(name) not in neutral
        ]
        if self._sampling.get("response_format", {}).get("type", "text") != "text":
            odd.append("response_format")
        if self._sampling.get("tool_choice") not in (None, "none", "auto"):
            odd.append("tool_choice")
        return f"sampling_not_trainable: {', '.join(odd)}" if odd else None

    def _take(self, choice: Json) -> None:
        self._ids.extend(choice.get("token_ids") or ())
        logprobs: Json = choice.get("logprobs") or {}
        content: list[Json] = logprobs.get("content") or []
        self._logprobs.extend(entry["logprob"] for entry in content)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        for span in choice.get("weight_versions") or ():
            self._spans.append(VersionSpan(int(span["version"]), span["start"], span["end"]))

    def _hide(self, choice: Json) -> None:
        if self._hides_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        if self._hides_ids and "token_ids" in choice:
            choice["token_ids"] = None
        if self._hides_versions and "weight_versions" in choice:
            choice["weight_versions"] = None

    def _exists_for_us(self, choice: Json) -> bool:
        """A token the engine's parser swallowed shows up as an empty delta only where ids or
        logprobs were asked."""
        asked_by_app = not (self._hides_logprobs and self._hides_ids)
        return (
            choice.get("delta") == {} and choice.get("finish_reason") is None and not asked_by_app
        )


def _is_missing(logprob: float | None) -> bool:
    """vLLM prints its floor where it has no number."""
    return logprob is None or logprob <= -9999.0 or logprob != logprob
