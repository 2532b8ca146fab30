"""Capture of one LLM call: what to ask of the engine, what to keep of its answer, what the app
must not see. What holds for every format; each has its own class.

The engine is asked for ids, logprobs, weight versions and usage. What the app did not ask for
itself is set back to null, as a plain vLLM prints it, and chunks that exist only because of our
asking are dropped. Ids and logprobs are the engine's own, never aligned with text; a call with a
hole in them is kept but marked untrainable, never padded.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from fakevllm_adapters.formats.sse import DONE, encode, parse_event
from fakevllm_server.rollout.sampling_rules import temperature_of, truncations, untrainable_sampling
from fakevllm_server.types.calls import RecordedCall, VersionSpan
from fakevllm_server.types.token_masks import TokenMasks
from fakevllm_server.types.weight_gate import CallStamp

Json = dict[str, Any]

_USAGE = "include_usage"
_FLOOR = -9999.0
"""vLLM prints it where it has no number."""
_CUT_OFF = ("abort", "error")
"""Finish reasons of answers that have no end."""
_ODD_SHAPE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading an answer that is not vLLM's raises."""
_MOST = 2**31 - 1
"""Ids, positions and versions travel to the trainer in 32 bits."""


class CallCapture(ABC):
    """Follows one call from the app's body to its record."""

    def __init__(
        self,
        body: Json,
        defaults: Json,
        refusal: str | None = None,
        *,
        reports_allowed: bool = False,
    ) -> None:
        """`defaults` are the engine's own; `refusal`, why nothing of this engine trains;
        `reports_allowed`, whether it says what tokens were chosen from."""
        sampling = defaults | {key: value for key, value in body.items() if value is not None}
        self.body = body
        self._temperature = temperature_of(sampling)
        self._refusal = refusal
        self._bent = untrainable_sampling(sampling, reports_allowed=reports_allowed)
        self._asks_allowed = reports_allowed and self._bent is None and bool(truncations(sampling))
        self._hides_logprobs = self._hides_logprobs_of(body)
        self._hides_ids = not body.get("return_token_ids")
        self._hides_versions = not body.get("return_weight_versions")
        self._hides_usage = _adds_usage(body)
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._spans: list[VersionSpan] = []
        self._chosen_from: Any = None
        self._finish_reason: str | None = None
        self._completion_tokens: int | None = None
        self._held: Json | None = None
        self._trouble: str | None = None
        self._is_broken = False

    @property
    def _hides_all(self) -> bool:
        return self._hides_logprobs and self._hides_ids

    # --- what differs by format

    @staticmethod
    def refuses(body: Json) -> bool:
        """Whether the call is to be relayed as it is: nothing of it could be trained."""
        return False

    @abstractmethod
    def _hides_logprobs_of(self, body: Json) -> bool:
        """Whether a plain vLLM would show the app none."""

    @abstractmethod
    def _ask_logprobs(self, body: Json) -> None:
        """Asks for them in `body`, where the app's own fields let the engine take that."""

    @abstractmethod
    def _logprobs_in(self, choice: Json) -> list[Any]:
        """One per token of this choice, as printed."""

    @abstractmethod
    def _exists_for_us(self, choice: Json) -> bool:
        """Whether a streamed choice would not be there but for our asking."""

    # --- the life of a call

    def upstream_body(self) -> Json:
        """The app's body with the capture fields."""
        body: Json = self.body | {"return_token_ids": True, "return_weight_versions": True}
        self._ask_logprobs(body)
        if self._asks_allowed:
            body["return_allowed_tokens"] = True
        if self._hides_usage:
            asked: Json = body.get("stream_options") or {}
            body["stream_options"] = asked | {
                _USAGE: True,
                "continuous_usage_stats": False,
            }
        return body

    def answer(self, raw: bytes) -> bytes:
        """Record a whole answer; returns it as the app may see it."""
        try:
            body: Json = orjson.loads(raw)
            usage: Json = body.get("usage") or {}
            self._completion_tokens = usage.get("completion_tokens")
            self._follow(body)
            return _as_vllm_writes(body) if not self._hides_logprobs else orjson.dumps(body)
        except _ODD_SHAPE:
            self._trouble = "unreadable_answer"
            return raw

    def event(self, event: bytes) -> bytes:
        """Record one stream event; returns what the app may see now: the event, nothing where it
        would not exist for the app, or one held back before with it."""
        try:
            chunk = parse_event(event)
            if chunk is not None and "error" in chunk:
                self._is_broken = True
                return self._released() + event
            if chunk is not None:
                return self._chunk(chunk)
        except _ODD_SHAPE:
            self._trouble = "unreadable_answer"
            return self._released() + event
        return self._released() + event if event == DONE else event

    def gave_up(self) -> None:
        """The engine answers the app's own body and refuses ours."""
        self._trouble = "capture_refused"

    def record(self, stamp: CallStamp) -> RecordedCall | None:
        """The call, or None where it did not come to its end."""
        cut_off = self._finish_reason is None or self._finish_reason in _CUT_OFF
        if (cut_off and self._trouble is None) or self._is_broken:
            return None
        has_all = len(self._logprobs) == len(self._ids) and all(map(_is_number, self._logprobs))
        versions = self._spans if _cover(self._spans, len(self._ids)) else None
        allowed = (
            TokenMasks.from_engine_answer(self._chosen_from, self._ids)
            if self._asks_allowed
            else None
        )
        return RecordedCall(
            prompt_ids=self._prompt_ids or [],
            response_ids=self._ids,
            logprobs=self._logprobs if has_all else None,
            versions=versions or [VersionSpan(v, 0, len(self._ids)) for v in stamp.versions],
            temperature=self._temperature,
            finish_reason=self._finish_reason,
            untrainable=self._untrainable(
                has_all, allowed, is_doubtful=versions is None and stamp.is_doubtful
            ),
            allowed=allowed,
        )

    def _untrainable(
        self, has_logprobs: bool, allowed: TokenMasks | None, *, is_doubtful: bool
    ) -> str | None:
        told = self._refusal or self._trouble or self._bent
        if told is not None:
            return told
        if not self._prompt_ids:
            return "missing_prompt_ids"
        if not self._ids and not self._completion_tokens:
            return "empty_response"
        if not has_logprobs:
            return "missing_logprob"
        if self._completion_tokens != len(self._ids):
            return "missing_usage" if self._completion_tokens is None else "missing_token_ids"
        if self._asks_allowed and allowed is None:
            return "missing_allowed_tokens"
        if allowed is not None and all(allowed.is_forced):
            return "nothing_to_choose"
        return "unknown_weights" if is_doubtful else None

    def _chunk(self, chunk: Json) -> bytes:
        usage: Json = chunk.get("usage") or {}
        self._completion_tokens = usage.get("completion_tokens", self._completion_tokens)
        choices: list[Json] = chunk.get("choices") or []
        if self._hides_usage and usage:
            if not choices:
                return self._released(chunk.get("system_fingerprint"))
            self._hides_usage = False  # this engine tells it to everybody
        self._follow(chunk)
        if choices and all(map(self._exists_for_us, choices)):
            return b""
        if self._hides_usage and any(choice.get("finish_reason") for choice in choices):
            self._held = chunk
            return b""
        return self._released() + encode(chunk)

    def _released(self, fingerprint: str | None = None) -> bytes:
        """The last chunk. Without a usage chunk behind it, it is the one to bear the
        fingerprint, which our asking moved there."""
        held, self._held = self._held, None
        if held is None:
            return b""
        return encode(held if fingerprint is None else _with_fingerprint(held, fingerprint))

    def _follow(self, body: Json) -> None:
        self._take_prompt(body)
        for choice in body.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._take(choice)
            self._take_prompt(choice)
            self._hide(choice)

    def _take_prompt(self, holder: Json) -> None:
        """From the whole answer or from a choice, as the format has it."""
        if holder.get("prompt_token_ids") is not None:
            self._prompt_ids = [_whole(id) for id in holder["prompt_token_ids"]]
        if self._hides_ids and "prompt_token_ids" in holder:
            holder["prompt_token_ids"] = None

    def _take(self, choice: Json) -> None:
        self._ids.extend([_whole(id) for id in choice.get("token_ids") or ()])
        self._logprobs.extend(self._logprobs_in(choice))
        reason: Any = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"a finish_reason is a word, not {reason!r:.100}")
        self._finish_reason = reason or self._finish_reason
        if self._asks_allowed:
            self._chosen_from = choice.get("allowed_tokens", self._chosen_from)
        for span in choice.get("weight_versions") or ():
            if str(span["version"]).isdecimal():  # vLLM's own may be any word
                version = _whole(int(span["version"]))
                self._spans.append(VersionSpan(version, _whole(span["start"]), _whole(span["end"])))

    def _hide(self, choice: Json) -> None:
        if self._hides_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        if self._hides_ids and "token_ids" in choice:
            choice["token_ids"] = None
        if self._hides_versions and "weight_versions" in choice:
            choice["weight_versions"] = None
        choice.pop("allowed_tokens", None)  # no vLLM has it, whoever asked


def _as_vllm_writes(body: Json) -> bytes:
    """Small numbers as 1e-05, where orjson has 1e-5."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _adds_usage(body: Json) -> bool:
    """Whether usage is asked for by us alone. Of several choices it tells only the sum."""
    if body.get("stream") is not True or body.get("n") not in (None, 1):
        return False
    options = body.get("stream_options")
    return not options or (isinstance(options, dict) and not body["stream_options"].get(_USAGE))


def _with_fingerprint(chunk: Json, fingerprint: str) -> Json:
    """Where vLLM prints it."""
    shown: Json = {}
    for key, value in chunk.items():
        shown[key] = value
        if key == "choices":
            shown["system_fingerprint"] = fingerprint
    return shown


def _cover(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether every token has its version, without a gap."""
    begins = [span.start for span in spans]
    ends = [span.end for span in spans]
    return bool(spans) and begins == [0, *ends[:-1]] and ends[-1] == length


def _whole(value: object) -> int:
    """The same number. Raises ValueError for what is none that could be an id."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"not an id: {value!r:.100}")
    return value


def _is_number(logprob: object) -> bool:
    return isinstance(logprob, int | float) and math.isfinite(logprob) and logprob > _FLOOR
