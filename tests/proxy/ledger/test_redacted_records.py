"""What the ledger stores of rows with redacted texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.ledger.records import FeedbackRecord, GroupRecord, StoredResponse
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.patterns import MARKER
from fakevllm_adapters.privacy.settings import PrivacySettings
from tests.proxy.ledger.ledger_cases import call, group, rows

SETTINGS = PrivacySettings(
    redact=("email", "phone", "card", "api_key"), patterns={"word": "secret", "hex": "[0-9a-f]{8}"}
)
REDACTOR = RecordRedactor(RedactionInUse(SETTINGS), b"key")
UUID = "550e8400-0123-4567-8901-446655440000"


@pytest.fixture
def redacting(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite", redaction=RedactionInUse(SETTINGS))
    yield opened
    opened.close()


def with_answer(record: GroupRecord, index: int, **columns: str | None) -> GroupRecord:
    siblings = list(record.siblings)
    siblings[index] = replace(siblings[index], **columns)  # type: ignore[arg-type]
    return replace(record, siblings=siblings)


def untrainable(path: Path) -> list[object]:
    return [row[0] for row in rows(path, "select untrainable from calls order by sibling")]


def test_numbers_and_ids_of_feedback_stay_as_they_are() -> None:
    row = FeedbackRecord(
        group_id="g",
        feedback_id="secret",
        received_at=1.0,
        score=0.5,
        reason="secret",
        comment="a secret",
        edited="no secret",
    )
    stored = REDACTOR.feedback(row)
    assert stored == replace(row, comment="a [redacted: word]", edited="no [redacted: word]")


@pytest.mark.parametrize("value", [UUID, f"chatcmpl-{UUID}", "resp_" + "0123abcd" * 4])
def test_random_ids_are_not_changed(value: str) -> None:
    assert REDACTOR.id(value) == value


def test_an_id_with_a_match_is_a_keyed_hash_that_is_always_the_same() -> None:
    hidden = REDACTOR.id("chatcmpl-ann@example.org")
    assert "ann" not in hidden
    assert REDACTOR.id("chatcmpl-ann@example.org") == hidden == REDACTOR.id(hidden)
    other = RecordRedactor(RedactionInUse(SETTINGS), b"other")
    assert other.id("chatcmpl-ann@example.org") != hidden


async def test_answers_and_responses_are_found_by_ids_that_match(
    redacting: Ledger, tmp_path: Path
) -> None:
    record = replace(group(), answer_id="my secret", response_id="resp_secret")
    redacting.record(record)
    response = StoredResponse("resp_secret", None, "g1", 1.0, b'{"id":"resp_secret","a":1}')
    redacting.responses.store(response)
    assert await redacting.flush()
    assert redacting.feedback.find_group("my secret", record.app_key) == "g1"
    assert redacting.answered_request("resp_secret", record.app_key) is not None
    found = redacting.responses.find("resp_secret", None)
    assert found is not None and found.body is not None
    assert json.loads(found.body)["id"] == redacting.hidden_id("resp_secret")
    redacting.responses.delete(found, 2.0)
    assert await redacting.flush()
    assert redacting.responses.find("resp_secret", None) is None
    ids = rows(tmp_path / "ledger.sqlite", "select answer_id, response_id from groups")
    assert ids == [(redacting.hidden_id("my secret"), redacting.hidden_id("resp_secret"))]


def test_the_id_of_the_continued_response_stays_usable() -> None:
    body = {"previous_response_id": "resp_secret", "input": "a secret"}
    stored = REDACTOR.group(replace(group(), request_json=json.dumps(body)))
    request = json.loads(stored.request_json)
    assert request["previous_response_id"] == REDACTOR.id("resp_secret")
    assert request["input"] == "a [redacted: word]"


def test_a_secret_that_begins_in_the_prompt_is_cut_out_of_the_answer() -> None:
    record = replace(group(), request_json='{"prompt":"write to ann@"}')
    message = '{"role":"assistant","content":"example.org now"}'
    stored = REDACTOR.group(with_answer(record, 1, text="example.org now", message_json=message))
    assert stored.siblings[1].text == " now"
    assert json.loads(stored.siblings[1].message_json or "")["content"] == " now"
    assert stored.siblings[0] == record.siblings[0]


async def test_only_the_texts_of_an_answer_decide_that_its_tokens_are_not_stored(
    redacting: Ledger, tmp_path: Path
) -> None:
    record = with_answer(group(rewards=(0.0, 1.0, 0.5)), 0, annotations_json='{"a":"secret"}')
    redacting.record(with_answer(record, 1, text="a secret"))
    assert await redacting.flush()
    calls = [[call()], [call(replica="replica-1")], [call()]]
    redacting.settle("g1", "pooled", None, 1, calls)
    assert await redacting.flush()
    stored = redacting.group("g1")
    assert stored is not None
    assert [one.replica for one in redacting.calls.versions("g1")] == [None, "replica-1", None]
    assert MARKER.search(stored.siblings[0].annotations_json or "")
    assert untrainable(tmp_path / "ledger.sqlite") == [None, "redacted", None]


async def test_the_stored_row_decides_although_the_proxy_was_restarted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for step in ("record", "settle"):
        ledger = Ledger.open(path, redaction=RedactionInUse(SETTINGS))
        if step == "record":
            ledger.record(replace(group(), question="a secret"))
        else:
            ledger.settle("g1", "pooled", None, 1, [[call()], [call()]])
        assert await ledger.flush()
        if step == "settle":
            assert untrainable(path) == ["redacted", "redacted"]
        ledger.close()
