"""Tests that the notes of a request have no text that must not be sent."""

from __future__ import annotations

from dataclasses import replace

from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.tracing.trace_redaction import redacted, without_content
from fakevllm_adapters.formats.base import Answer
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings
from tests.proxy.tracing.finished_traces import QUESTION, call, record, sibling, trace

MAIL = "ada@example.com"
REDACTOR = RecordRedactor(RedactionInUse(PrivacySettings(redact=("email",))), b"key")


def test_without_content_no_text_is_kept_for_the_thread() -> None:
    answer = Answer({"role": "assistant", "content": "my answer"}, "stop", {}, "id")
    facts = replace(trace().facts, messages=None)
    kept = without_content(trace(facts=facts, calls=(call(0, answer=answer),)))
    text = str(kept)
    assert QUESTION not in text and "answer" not in text.replace("answered_ns", "").replace(
        "answer_id", ""
    ).replace("answer=Answer", "").replace("kept_answer", "")
    assert kept.record.siblings[1].reward == 0.5


def test_all_texts_and_ids_are_redacted() -> None:
    message = f'{{"role": "assistant", "content": "write to {MAIL}"}}'
    answer = Answer({"role": "assistant", "content": MAIL}, "stop", {}, f"chatcmpl-{MAIL}", MAIL)
    messages = [{"role": "user", "content": f"I am {MAIL}"}]
    facts = replace(trace().facts, model=MAIL, messages=messages, sampling={"model": MAIL})
    planted = record(
        request_json=f'{{"messages": [{{"role": "user", "content": "I am {MAIL}"}}]}}',
        question=f"I am {MAIL}",
        session_id=MAIL,
        answer_id=f"chatcmpl-{MAIL}",
        siblings=[sibling(0, message_json=message, text=f"write to {MAIL}")],
    )
    one = call(0, answer=answer, sampling={"model": MAIL})
    safe = redacted(trace(facts=facts, record=planted, calls=(one,)), REDACTOR)
    assert MAIL not in str(safe)
    assert safe.record.siblings[0].message_json != message
    assert safe.calls[0].answer is not None and safe.calls[0].answer.finish_reason == "stop"


def test_without_a_pattern_nothing_is_changed_but_the_copies_of_the_answers() -> None:
    plain = RecordRedactor(RedactionInUse(PrivacySettings()))
    same = redacted(trace(), plain)
    assert (same.facts, same.record) == (trace().facts, trace().record)
    assert same.calls == trace().calls
