"""The spans of one request, as plain values. This module does no I/O.

The names of spans and attributes are those of the GenAI semantic conventions, in the version
`CONVENTIONS`. Attributes that the conventions lack begin with `fakevllm.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import orjson

from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import BROKEN_OFF, SiblingRecord, State
from fakevllm.tracing.message_parts import content_json, input_messages, output_messages
from fakevllm.tracing.request_trace import CallTrace, FinishedTrace, HookTrace
from fakevllm_adapters.formats.base import Json

CONVENTIONS = "1.41.0"
"""Version of OpenTelemetry's semantic conventions whose names the spans have."""
PROVIDER = "fakevllm"
FALLBACK_PROVIDER = "openai"
"""Provider of the fallback server's answers. The conventions name a provider that is only known by
its API after this API."""
CANCELLED = "cancelled"
"""Type of the error of a call that was ended before it had an answer."""
_FALLBACK = "fallback"
"""First word of a record's reason if the fallback server has answered."""
_MAX_INT = 2**63 - 1
"""Largest integer that a span can contain."""
_NUMBERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "top_k": "gen_ai.request.top_k",
}
"""Attribute for each sampling field with a number that may have decimals."""
_COUNTS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
}
"""Attribute for each sampling field with a whole number. The later one wins."""
_DEFAULT_PORTS = {"http": 80, "https": 443}

Value = str | bool | int | float | list[str]
Attributes = dict[str, Value]


class Kind(StrEnum):
    """The kind of a span, by its OpenTelemetry name."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """One span, with times in Unix nanoseconds."""

    name: str
    kind: Kind
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, Value]
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class RequestSpans:
    """All spans of one request of an app."""

    request: PlannedSpan
    children: tuple[PlannedSpan, ...]
    parent: Mapping[str, str]
    """Headers of the W3C trace context that the app sent."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The host and the port of a server that is called."""

    host: str
    port: int

    @staticmethod
    def of_url(url: str) -> Upstream:
        """Return the host and port of an address.

        >>> Upstream.of_url("https://gpu-box/v1")
        Upstream(host='gpu-box', port=443)
        """
        parts = urlsplit(url)
        return Upstream(parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 0))

    @property
    def attributes(self) -> Attributes:
        return {"server.address": self.host, "server.port": self.port}


class SpanPlanner:
    """Makes the spans of requests."""

    def __init__(self, engine: Upstream, fallback: Upstream | None, *, with_content: bool) -> None:
        """Create the planner. `engine` and `fallback` are the servers that the proxy calls. With
        `with_content`, the spans contain the messages of requests and the answers."""
        self._engine = engine
        self._fallback = fallback
        self._with_content = with_content

    def spans(self, trace: FinishedTrace) -> RequestSpans:
        """Return the spans of a request that has ended. `trace` must be redacted already."""
        siblings = {sibling.index: sibling for sibling in trace.record.siblings}
        calls = [self._call_span(trace, call, siblings) for call in trace.calls]
        hooks = [_hook_span(trace, hook) for hook in trace.hooks]
        children = sorted((*calls, *hooks), key=lambda span: span.started_ns)
        return RequestSpans(self._request_span(trace), tuple(children), trace.facts.parent)

    def _request_span(self, trace: FinishedTrace) -> PlannedSpan:
        facts, record = trace.facts, trace.record
        served = next((one for one in record.siblings if one.served), None)
        call = _served_call(trace)
        attributes = (
            _request_attributes(trace, facts.model, facts.sampling)
            | {
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.stream": record.streamed,
                "http.route": record.route,
                "http.response.status_code": record.status,
            }
            | _answer_attributes(served)
            | _known(
                {
                    "gen_ai.conversation.id": record.session_id,
                    "gen_ai.response.id": record.answer_id if served is not None else None,
                    "gen_ai.response.model": _response_model(call),
                    "fakevllm.weight_version": None if call is None else call.weight_version,
                    "fakevllm.group.state": record.state,
                    "fakevllm.group.reason": _slug(record.reason),
                    "fakevllm.group.num_siblings": record.num_siblings,
                    "fakevllm.group.cut": _slug(record.cut),
                    "fakevllm.served.index": record.served_index,
                    "fakevllm.served.by": record.served_by,
                    "fakevllm.served.propensity": record.propensity,
                    "fakevllm.best.index": record.best_index,
                    "fakevllm.reward": None if served is None else served.reward,
                    "fakevllm.arm": record.arm,
                    "fakevllm.task.id": record.task_id,
                    "fakevllm.session.turn": record.turn,
                    "fakevllm.session.parent_id": record.parent_session_id,
                    "fakevllm.request.kind": record.kind,
                }
            )
        )
        is_failed = record.state == State.FAILED
        if is_failed or record.status >= 400:
            attributes["error.type"] = _slug(record.reason) or str(record.status)
        if self._with_content:
            attributes |= _content("gen_ai.input.messages", input_messages(facts.messages))
            if served is not None:
                attributes |= _content("gen_ai.output.messages", _output(served))
        # As the conventions for HTTP servers demand, a mistake of the client is no error.
        is_error = is_failed and record.status >= 500
        name = _name(trace, facts.model)
        return PlannedSpan(
            name, Kind.SERVER, trace.started_ns, trace.answered_ns, attributes, is_error
        )

    def _call_span(
        self, trace: FinishedTrace, call: CallTrace, siblings: Mapping[int, SiblingRecord]
    ) -> PlannedSpan:
        model = str(call.sampling.get("model") or trace.facts.model)
        upstream = self._fallback if call.is_fallback else self._engine
        attributes = (
            _request_attributes(trace, model, call.sampling)
            | {"gen_ai.provider.name": FALLBACK_PROVIDER if call.is_fallback else PROVIDER}
            | (upstream.attributes if upstream is not None else {})
            | _known(
                {
                    "gen_ai.response.id": call.answer.id if call.answer is not None else None,
                    "gen_ai.response.model": _response_model(call),
                    "http.response.status_code": call.status,
                    "fakevllm.call.attempts": call.num_attempts,
                    "fakevllm.weight_version": call.weight_version,
                }
            )
        )
        sibling = siblings.get(call.index) if _has_row(trace, call) else None
        if call.is_fallback:
            attributes["fakevllm.fallback"] = True
        else:
            attributes["fakevllm.call.num_siblings"] = call.num_sharing
            attributes |= {"fakevllm.sibling.index": call.index} | _sibling_attributes(sibling)
        attributes |= _answer_attributes(sibling) or _usage_attributes(call)
        error = _call_error(trace, call, sibling)
        if error is not None:
            attributes["error.type"] = error
        if self._with_content and sibling is not None:
            attributes |= _content("gen_ai.output.messages", _output(sibling))
        return PlannedSpan(
            _name(trace, model),
            Kind.CLIENT,
            call.started_ns,
            trace.ended_ns if call.ended_ns is None else call.ended_ns,
            attributes,
            error is not None,
        )


def _hook_span(trace: FinishedTrace, hook: HookTrace) -> PlannedSpan:
    has_ended = hook.ended_ns is not None
    error = _slug(hook.reason) if has_ended else CANCELLED
    attributes = _known(
        {
            "fakevllm.group.id": trace.record.group_id,
            "fakevllm.hook.name": hook.name,
            "fakevllm.hook.hash": hook.hook_hash,
            "error.type": error,
        }
    )
    ended_ns = trace.ended_ns if hook.ended_ns is None else hook.ended_ns
    return PlannedSpan(
        hook.name, Kind.INTERNAL, hook.started_ns, ended_ns, attributes, error is not None
    )


def _served_call(trace: FinishedTrace) -> CallTrace | None:
    """Return the call whose answer the app got; None if it is unknown."""
    index = trace.record.served_index
    own = (one for one in trace.calls if one.index == index and _has_row(trace, one))
    return next(own, None)


def _has_row(trace: FinishedTrace, call: CallTrace) -> bool:
    """Return True if the record's row of a sibling may belong to this call. If the fallback server
    answered, the record has only the row of its answer."""
    return call.is_fallback == (_slug(trace.record.reason) == _FALLBACK)


def _name(trace: FinishedTrace, model: str) -> str:
    """Return the name of a span: the operation and the model."""
    return f"{_operation(trace)} {model}".rstrip()


def _operation(trace: FinishedTrace) -> str:
    return "text_completion" if trace.facts.is_text_completion else "chat"


def _request_attributes(trace: FinishedTrace, model: str, sampling: Json) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": _operation(trace),
        "fakevllm.group.id": trace.record.group_id,
    }
    if model:
        attributes["gen_ai.request.model"] = model
    for name, attribute in _NUMBERS.items():
        value = sampling.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            attributes[attribute] = float(value)
    for name, attribute in _COUNTS.items():
        if (count := _count(sampling.get(name))) is not None:
            attributes[attribute] = count
    num_choices = _count(sampling.get("n"))
    if num_choices not in (None, 1):
        attributes["gen_ai.request.choice.count"] = num_choices
    return attributes


def _count(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if abs(value) <= _MAX_INT else None


def _answer_attributes(sibling: SiblingRecord | None) -> Attributes:
    if sibling is None:
        return {}
    return _known(
        {
            "gen_ai.response.finish_reasons": [sibling.finish_reason]
            if sibling.finish_reason
            else None,
            "gen_ai.usage.input_tokens": sibling.prompt_tokens,
            "gen_ai.usage.output_tokens": sibling.completion_tokens,
        }
    )


def _usage_attributes(call: CallTrace) -> Attributes:
    """Return what a call's own answer says, if the record has no row of it."""
    if call.answer is None:
        return {}
    reason, usage = call.answer.finish_reason, call.answer.usage
    return _known(
        {
            "gen_ai.response.finish_reasons": [reason] if reason else None,
            "gen_ai.usage.input_tokens": _count(usage.get("prompt_tokens")),
            "gen_ai.usage.output_tokens": _count(usage.get("completion_tokens")),
        }
    )


def _sibling_attributes(sibling: SiblingRecord | None) -> Attributes:
    if sibling is None:
        return {}
    return _known(
        {
            "fakevllm.sibling.served": sibling.served,
            "fakevllm.sibling.best": sibling.best,
            "fakevllm.sibling.reward": sibling.reward,
            "fakevllm.sibling.failure": sibling.failure,
        }
    )


def _call_error(trace: FinishedTrace, call: CallTrace, sibling: SiblingRecord | None) -> str | None:
    """Return the type of the error with which a call has ended; None if it has an answer."""
    if sibling is not None and sibling.failure == BROKEN_OFF:
        return BROKEN_OFF
    if call.status is None:
        is_failed = trace.record.state == State.FAILED
        return (_slug(trace.record.reason) if is_failed else None) or CANCELLED
    if call.status != 200:
        return str(call.status)
    is_served = sibling is not None and sibling.served  # an answer that the proxy does not parse
    is_answered = call.answer is not None or is_served or call.is_fallback
    return None if is_answered else EndReason.NO_ANSWER.value


def _response_model(call: CallTrace | None) -> str | None:
    return None if call is None or call.answer is None else call.answer.model


def _output(sibling: SiblingRecord) -> list[dict[str, Any]]:
    if sibling.message_json is None:
        return []
    return output_messages(orjson.loads(sibling.message_json), sibling.finish_reason)


def _content(name: str, messages: list[dict[str, Any]]) -> Attributes:
    text = content_json(messages)
    if text is not None:
        return {name: text}
    return {"fakevllm.content.too_long": True} if messages else {}


def _slug(reason: str | None) -> str | None:
    """Return the first word of a reason. Its rest may quote a text of the app or of a hook.

    >>> _slug("hook_raised: ValueError: my secret"), _slug(None)
    ('hook_raised', None)
    """
    return None if reason is None else reason.partition(":")[0]


def _known(values: Mapping[str, Value | None]) -> Attributes:
    return {name: value for name, value in values.items() if value is not None}
