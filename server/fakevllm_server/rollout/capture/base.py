"""Capture of one LLM call. The call's tokens are recorded for training, and the app gets the same
answer as from a plain vLLM.

This module has the part that all wire formats share. Each wire format has a subclass of
CallCapture.

* The engine is asked for token ids, logprobs, weight versions and usage.
* Answer fields that only the capture requested are reset to null, as in a plain vLLM's answer.
  Stream chunks that vLLM sends only because of the capture's request fields are removed.
* Token ids and logprobs are recorded as the engine reported them. They are never derived from the
  text.
* A call with a missing id or logprob is recorded, but marked as untrainable. Missing values are
  never filled in.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Self

import orjson

from fakevllm_adapters.formats.chat import is_true
from fakevllm_adapters.formats.sse import DONE, encode, parse_event
from fakevllm_adapters.privacy.continued_text import continued_texts
from fakevllm_adapters.privacy.redactor import OFF, AnswerTexts, Redactor
from fakevllm_server.rollout.capture.token_event import TokenEventReader
from fakevllm_server.rollout.sampling_rules import (
    sampling_temperature,
    truncations,
    untrainable_sampling,
)
from fakevllm_server.types.calls import MAX_ID, RecordedCall, VersionSpan, checked_ids
from fakevllm_server.types.number_arrays import IdArray
from fakevllm_server.types.token_masks import TokenMasks
from fakevllm_server.types.weight_versions import CallStamp

Json = dict[str, Any]

_USAGE = "include_usage"
_MISSING_LOGPROB = -9999.0
"""Value that vLLM prints for a logprob that it does not have."""
REDACTED = "redacted"
"""Reason why a call cannot be trained: its text has something that is redacted."""
_CUT_OFF = ("abort", "error")
"""Finish reasons that show that an answer is incomplete."""
_PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors that can occur while reading an answer that does not have vLLM's form."""


class CallCapture(ABC):
    """Capture of one LLM call: it adds fields to the request for the engine, and records the tokens
    in the answer. Create a capture from the app's request body. After the answer, `record` returns
    the recorded call."""

    def __init__(
        self,
        body: Json,
        defaults: Json,
        refusal: str | None = None,
        *,
        reports_allowed: bool = False,
        replica: str | None = None,
        redactor: Redactor = OFF,
        is_redacted: bool = False,
    ) -> None:
        """Prepare the capture of one call.

        `body` is the app's request. `defaults` are the engine's default sampling parameters.
        `refusal` is the reason why calls of this engine must not be trained on, or None if these
        calls may be trained on. `reports_allowed` is True if the engine can report the set of
        tokens from which each token was sampled. `replica` is the engine's name in a fleet, or None
        for the only engine. `is_redacted` is True if the request has text that is redacted. The
        recorded call has no tokens if `is_redacted` is True, or if `redactor` finds something in
        the answer.
        """
        self._redactor = redactor
        self._is_redacted = is_redacted
        sampling = defaults | {key: value for key, value in body.items() if value is not None}
        self.body = body
        self._temperature = sampling_temperature(sampling)
        self._refusal = refusal
        self._replica = replica
        self._untrainable_sampling = untrainable_sampling(sampling, reports_allowed=reports_allowed)
        self._requests_allowed = (
            reports_allowed and self._untrainable_sampling is None and bool(truncations(sampling))
        )
        self._hides_logprobs = self._app_gets_no_logprobs(body)
        self._hides_ids = not is_true(body.get("return_token_ids"))
        self._hides_versions = not body.get("return_weight_versions")
        self._begin_answer()

    def for_another_answer(self) -> Self:
        """Return a new capture (recorder of one model call's tokens) for another answer to the same
        request. The new capture has recorded nothing yet."""
        other = copy(self)
        other._begin_answer()
        return other

    def _begin_answer(self) -> None:
        """Set the initial values of all attributes that change while an answer is recorded."""
        self._hides_usage = _adds_usage(self.body)
        self._prompt_ids: IdArray | None = None
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._token_events: TokenEventReader | None = None
        """Reader of the usual events of a stream, each of which has one token. None if such an
        event must be changed in other ways than by hiding ids and logprobs."""
        self._spans: list[VersionSpan] = []
        self._allowed_tokens: Any = None
        self._finish_reason: str | None = None
        self._completion_tokens: int | None = None
        self._held_chunk: Json | None = None
        self.usage_chunk: Json | None = None
        """The usage chunk of the stream, as the engine sent it; None if there was none."""
        self._capture_failure: str | None = None
        self._texts = AnswerTexts() if self._redactor and not self._is_redacted else None
        """The texts of the answer; None if they are not searched."""
        self._has_error_event = False

    @property
    def _hides_all(self) -> bool:
        return self._hides_logprobs and self._hides_ids

    # --- differences between the formats

    @staticmethod
    def cannot_capture(body: Json) -> bool:
        """Return True if no part of a call with this request body could be trained on. Such a call
        is forwarded to the engine, and its tokens are not recorded."""
        return False

    @abstractmethod
    def _app_gets_no_logprobs(self, body: Json) -> bool:
        """Return True if a plain vLLM would answer this request body without logprobs."""

    @abstractmethod
    def _request_logprobs(self, body: Json) -> None:
        """Add the field that requests logprobs to `body`, the request for the engine.

        The field is not added if vLLM would refuse the combination of the app's own fields, because
        the app must get this refusal.
        """

    @abstractmethod
    def _logprobs_in(self, choice: Json) -> list[Any]:
        """Return the logprob of each token in one choice of an answer. The logprobs are those that
        the engine reported."""

    @abstractmethod
    def _is_extra_choice(self, choice: Json) -> bool:
        """Return True if a plain vLLM would not have sent this choice of a stream chunk. vLLM has
        sent the choice only because this capture added fields to the app's request."""

    # --- from the request to the record

    def upstream_body(self) -> Json:
        """Return the request body for the engine: the app's body with the fields that are needed to
        record the call's tokens."""
        body: Json = self.body | {"return_token_ids": True, "return_weight_versions": True}
        self._request_logprobs(body)
        if self._requests_allowed:
            body["return_allowed_tokens"] = True
        if self._hides_usage:
            options: Json = body.get("stream_options") or {}
            body["stream_options"] = options | {
                _USAGE: True,
                "continuous_usage_stats": False,
            }
        return body

    def answer(self, raw: bytes, on_answer: Callable[[Json], None] = lambda _: None) -> bytes:
        """Record the tokens of a complete answer that is not a stream. Return the answer without
        the fields that the app did not request. `on_answer` is called with the parsed answer that
        is returned."""
        try:
            body: Json = orjson.loads(raw)
            shown = self.whole(body)
            on_answer(body)
            return shown
        except _PARSE_ERRORS:
            self._capture_failure = "unreadable_answer"
            return raw

    def whole(self, body: Json) -> bytes:
        """Record the tokens of `body`, a parsed answer that is not a stream. Return the answer for
        the app, without the fields that the app did not request."""
        usage: Json = body.get("usage") or {}
        self._completion_tokens = usage.get("completion_tokens")
        if self._texts is not None:
            self._texts.add(body)
        self._record_and_hide(body)
        return _as_vllm_writes(body) if not self._hides_logprobs else orjson.dumps(body)

    def stream(self, chunks: Iterable[Json]) -> bytes:
        """Record the parsed chunks of a whole stream. Return the events that the app may see, up to
        and including `[DONE]`."""
        shown = [self._chunk(chunk) for chunk in chunks]
        return b"".join([*shown, self._release_held_chunk(), DONE])

    @property
    def first_version(self) -> int | None:
        """The version of the weights that sampled the first token. The version is None if the
        engine has not reported it."""
        return self._spans[0].version if self._spans else None

    @property
    def has_one_choice(self) -> bool:
        """Whether the app's request asks for only one choice (`n` is 1 or missing)."""
        return self.body.get("n") in (None, 1)

    @property
    def takes_long(self) -> bool:
        """Whether `record` may take long, so that another thread should call it. `record` may take
        long if it reads the sets of allowed tokens, or if it searches a long answer for texts to
        redact."""
        return self._requests_allowed or (self._texts is not None and self._texts.is_long)

    @property
    def requests_allowed(self) -> bool:
        """Whether the engine is asked to report, for each sampled token, the set of tokens from
        which it was sampled."""
        return self._requests_allowed

    @property
    def hides_prompt_ids(self) -> bool:
        """True if the prompt's token ids must be removed from the answer, because the app did not
        request token ids."""
        return self._hides_ids

    def use_prompt_ids(self, prompt_ids: IdArray) -> None:
        """Record `prompt_ids` as the token ids of the call's prompt. The records of several answers
        may share this list."""
        self._prompt_ids = prompt_ids

    def complete_answer(self, tokens: Json, answer: bytes) -> bytes:
        """Record the tokens of an answer. The engine has sent the tokens separately from the answer
        (see `SentChoice`). Return the answer in the form in which vLLM writes it.

        Raises ValueError, TypeError or LookupError if the tokens are malformed.
        """
        if self._texts is not None:
            self._texts.add_answer(answer)
        self._ids += checked_ids(tokens["token_ids"])
        self._logprobs += tokens["logprobs"]
        self._completion_tokens = len(self._ids)
        self._record_end(tokens)
        if self._hides_logprobs or self.body.get("stream") is True:
            return answer
        return _as_vllm_writes(orjson.loads(answer))

    def event(self, event: bytes) -> bytes:
        """Record one event of a stream, and return the bytes to send to the app now.

        The result is empty if the app must not see the event, or if the event is held back. An
        event that was held back is returned later, in front of the next event for the app.
        """
        try:
            if self._texts is not None:
                self._texts.add_answer(event)
            if self._token_events is not None and self._held_chunk is None:
                shown = self._token_events.read(event)
                if shown is not None:
                    return shown
            chunk = parse_event(event)
            if chunk is not None and "error" in chunk:
                self._has_error_event = True
                return self._release_held_chunk() + event
            if chunk is not None:
                return self._chunk(chunk)
        except _PARSE_ERRORS:
            self._capture_failure = "unreadable_answer"
            return self._release_held_chunk() + event
        return self._release_held_chunk() + event if event == DONE else event

    def mark_refused(self) -> None:
        """Record that the engine refused the fields that were added to the app's request to record
        the call's tokens. The engine has answered the request without these fields. Such a call is
        untrainable."""
        self._capture_failure = "capture_refused"

    def record(self, stamp: CallStamp) -> RecordedCall | None:
        """Return the recorded call, or None if the answer is incomplete.

        If the engine did not report a weight version for every token, the versions are taken from
        `stamp`. The stamp contains all versions that were served during the call.
        """
        cut_off = self._finish_reason is None or self._finish_reason in _CUT_OFF
        if (cut_off and self._capture_failure is None) or self._has_error_event:
            return None
        if self._is_redacted or self._finds_in_answer():
            reason, finish = REDACTED, self._finish_reason
            return RecordedCall(
                [], [], None, [], self._temperature, finish, reason, replica=self._replica
            )
        self._take_tokens()
        has_all = len(self._logprobs) == len(self._ids) and _are_logprobs(self._logprobs)
        versions = self._spans if _cover(self._spans, len(self._ids)) else None
        allowed = (
            TokenMasks.from_engine_answer(self._allowed_tokens, self._ids)
            if self._requests_allowed
            else None
        )
        return RecordedCall(
            prompt_ids=self._prompt_ids or [],
            response_ids=self._ids,
            logprobs=self._logprobs if has_all else None,
            versions=versions or [VersionSpan(v, 0, len(self._ids)) for v in stamp.versions],
            temperature=self._temperature,
            finish_reason=self._finish_reason,
            untrainable=self._untrainable_reason(
                has_all, allowed, is_doubtful=versions is None and stamp.is_doubtful
            ),
            allowed=allowed,
            replica=self._replica,
        )

    def _finds_in_answer(self) -> bool:
        """Return True if the redactor finds something to redact in the answer. A match may begin in
        the prompt, if the answer continues the prompt's text."""
        if self._texts is None:
            return False
        return self._redactor.finds_continued(continued_texts(self.body), self._texts.texts)

    def _untrainable_reason(
        self, has_logprobs: bool, allowed: TokenMasks | None, *, is_doubtful: bool
    ) -> str | None:
        """Return the reason why the call must not be trained on, or None."""
        known = self._refusal or self._capture_failure or self._untrainable_sampling
        if known is not None:
            return known
        if not self._prompt_ids:
            return "missing_prompt_ids"
        if not self._ids and not self._completion_tokens:
            return "empty_response"
        if not has_logprobs:
            return "missing_logprob"
        if self._completion_tokens != len(self._ids):
            return "missing_usage" if self._completion_tokens is None else "missing_token_ids"
        if self._requests_allowed and allowed is None:
            return "missing_allowed_tokens"
        if allowed is not None and all(allowed.is_forced):
            return "nothing_to_choose"
        return "unknown_weights" if is_doubtful else None

    def _chunk(self, chunk: Json) -> bytes:
        """Record one chunk of a stream, and return the bytes to send to the app now."""
        usage: Json = chunk.get("usage") or {}
        self._completion_tokens = usage.get("completion_tokens", self._completion_tokens)
        choices: list[Json] = chunk.get("choices") or []
        if usage and not choices:
            self.usage_chunk = chunk
        if self._hides_usage and usage:
            if not choices:
                return self._release_held_chunk(chunk.get("system_fingerprint"))
            self._hides_usage = False  # this engine sends usage with each chunk, requested or not
        self._record_and_hide(chunk)
        if choices and all(map(self._is_extra_choice, choices)):
            return b""
        if self._hides_usage and any(choice.get("finish_reason") for choice in choices):
            self._held_chunk = chunk
            return b""
        return self._release_held_chunk() + encode(chunk)

    def _release_held_chunk(self, fingerprint: str | None = None) -> bytes:
        """Return the stream chunk that was held back, as bytes for the app. Return no bytes if no
        chunk was held back.

        vLLM writes the system fingerprint only in the last chunk of a stream. If usage (token
        counts) was requested, the last chunk is the usage chunk. If only the capture requested
        usage, the app does not get the usage chunk. The app's last chunk is then the chunk before
        the usage chunk. This chunk is held back until the usage chunk arrives, and then gets the
        usage chunk's `fingerprint`.
        """
        held, self._held_chunk = self._held_chunk, None
        if held is None:
            return b""
        return encode(held if fingerprint is None else _with_fingerprint(held, fingerprint))

    def _record_and_hide(self, body: Json) -> None:
        """Record an answer or a chunk, and hide the fields that the app did not request."""
        self._record_prompt(body)
        for choice in body.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._record_choice(choice)
            self._record_prompt(choice)
            self._hide(choice)

    def _record_prompt(self, holder: Json) -> None:
        """Record the prompt's token ids, and hide the ids if the app did not request them.

        `holder` is the part of the answer that contains the ids. This part is the whole answer or,
        in the completions format, a choice.
        """
        if holder.get("prompt_token_ids") is not None:
            self._prompt_ids = checked_ids(holder["prompt_token_ids"])
        if self._hides_ids and "prompt_token_ids" in holder:
            holder["prompt_token_ids"] = None

    def _record_choice(self, choice: Json) -> None:
        """Record token ids, logprobs, finish reason, allowed tokens and weight versions of a
        choice."""
        self._take_tokens()
        self._ids.extend([_checked_id(id) for id in choice.get("token_ids") or ()])
        self._logprobs.extend(self._logprobs_in(choice))
        self._record_end(choice)

    def _record_end(self, choice: Json) -> None:
        """Record finish reason, allowed tokens and weight versions from one choice of an answer or
        of a stream chunk. Most chunks have none of them."""
        reason: Any = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"finish_reason must be a string, got {reason!r:.100}")
        self._finish_reason = reason or self._finish_reason
        if self._requests_allowed:
            self._allowed_tokens = choice.get("allowed_tokens", self._allowed_tokens)
        for span in choice.get("weight_versions") or ():
            if str(span["version"]).isdecimal():  # vLLM's own weight version may be any string
                version = _checked_id(int(span["version"]))
                start, end = _checked_id(span["start"]), _checked_id(span["end"])
                self._spans.append(VersionSpan(version, start, end))

    def _take_tokens(self) -> None:
        """Move the tokens that the TokenEventReader has collected into this capture. The reader
        handles the usual events of a stream, which are not parsed as JSON."""
        if self._token_events is not None:
            ids, logprobs = self._token_events.take_tokens()
            self._ids += ids
            self._logprobs += logprobs

    def _hide(self, choice: Json) -> None:
        """In one choice of the answer, remove or reset the fields that only this capture requested,
        and not the app."""
        if self._hides_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        if self._hides_ids and "token_ids" in choice:
            choice["token_ids"] = None
        if self._hides_versions and "weight_versions" in choice:
            choice["weight_versions"] = None
        choice.pop("allowed_tokens", None)  # no vLLM has this field, even if the app requests it


def _as_vllm_writes(body: Json) -> bytes:
    """Serialize an answer to JSON as vLLM does. Small numbers differ between serializers: vLLM
    writes 1e-05, orjson would write 1e-5."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _adds_usage(body: Json) -> bool:
    """Return True if usage (token counts) must be requested to record the call, because the app
    does not request it.

    Usage is added only for streams with one choice. vLLM reports the sum over all choices, so with
    several choices the counts of a single choice would be unknown.
    """
    if body.get("stream") is not True or body.get("n") not in (None, 1):
        return False
    options = body.get("stream_options")
    return not options or (isinstance(options, dict) and not body["stream_options"].get(_USAGE))


def _with_fingerprint(chunk: Json, fingerprint: str) -> Json:
    """Return a stream chunk with the system fingerprint. The fingerprint is inserted after
    `choices`, as in vLLM."""
    extended: Json = {}
    for key, value in chunk.items():
        extended[key] = value
        if key == "choices":
            extended["system_fingerprint"] = fingerprint
    return extended


def _cover(spans: Sequence[VersionSpan], length: int) -> bool:
    """Return True if the version spans (ranges of tokens, each with a weight version) cover exactly
    `length` tokens, without gaps."""
    begins = [span.start for span in spans]
    ends = [span.end for span in spans]
    return bool(spans) and begins == [0, *ends[:-1]] and ends[-1] == length


def _checked_id(value: object) -> int:
    """Return `value` if it is an integer from 0 to MAX_ID. Token ids, positions and weight versions
    are such integers. Raises ValueError for any other value."""
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise ValueError(f"not an id: {value!r:.100}")
    return value


def _are_logprobs(values: Sequence[Any]) -> bool:
    """Return True if all values are finite numbers. Return False if a value is the placeholder that
    vLLM prints for a missing logprob."""
    are_finite = set(map(type, values)) <= {int, float, bool} and all(map(math.isfinite, values))
    return are_finite and min(values, default=0.0) > _MISSING_LOGPROB
