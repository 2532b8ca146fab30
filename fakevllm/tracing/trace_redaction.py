"""Redaction of everything that the spans of a request may contain, by the redactor of the ledger.
This module does no I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from fakevllm.ledger.records import SiblingRecord
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.tracing.request_trace import CallTrace, FinishedTrace
from fakevllm_adapters.formats.base import Answer


def without_content(trace: FinishedTrace) -> FinishedTrace:
    """Return the notes about a request without the texts of the request and of its answers."""
    record = replace(
        trace.record,
        request_json="{}",
        question="",
        siblings=[_without_texts(sibling) for sibling in trace.record.siblings],
        kept_answer=None,
    )
    calls = tuple(replace(call, answer=_shell(call.answer)) for call in trace.calls)
    return replace(trace, record=record, calls=calls)


def redacted(trace: FinishedTrace, redactor: RecordRedactor) -> FinishedTrace:
    """Return the notes about a request. A marker replaces each match of a redaction pattern. The
    messages of answers are in the record only, because the redactor knows records."""
    facts = trace.facts
    messages: Any = facts.messages
    if messages is not None:
        messages = orjson.loads(redactor.json_text(orjson.dumps(messages).decode()))
    facts = replace(
        facts,
        model=redactor.text(facts.model),
        messages=messages,
        sampling=_with_redacted_model(facts.sampling, redactor),
    )
    calls = tuple(_redacted_call(call, redactor) for call in trace.calls)
    return replace(trace, facts=facts, record=redactor.group(trace.record), calls=calls)


def _redacted_call(call: CallTrace, redactor: RecordRedactor) -> CallTrace:
    answer = call.answer
    if answer is not None:
        answer = replace(
            answer,
            message={},
            id=None if answer.id is None else redactor.id(answer.id),
            model=None if answer.model is None else redactor.text(answer.model),
        )
    return replace(call, answer=answer, sampling=_with_redacted_model(call.sampling, redactor))


def _with_redacted_model(sampling: dict[str, Any], redactor: RecordRedactor) -> dict[str, Any]:
    model = sampling.get("model")
    return sampling | {"model": redactor.text(model)} if isinstance(model, str) else sampling


def _shell(answer: Answer | None) -> Answer | None:
    return None if answer is None else replace(answer, message={})


def _without_texts(sibling: SiblingRecord) -> SiblingRecord:
    return replace(
        sibling,
        text=None,
        message_json=None,
        tool_calls_json=None,
        annotations_json=None,
        error=None,
    )
