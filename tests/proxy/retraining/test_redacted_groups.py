"""`fakevllm retrain` trains no tokens of texts that are redacted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.retraining.group_reader import GroupReader, NotTrained, TrainableGroup
from fakevllm.retraining.token_check import plain_answer
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.swarm import CapturedCall
from fakevllm_server.types.calls import RecordedCall
from tests.proxy.ledger.ledger_cases import call, group

CHAT = '{{"messages":[{{"role":"user","content":"{}"}}]}}'
WITHOUT_TOKENS = call().model_copy(
    update={
        "prompt_ids": "",
        "response_ids": "",
        "logprobs": None,
        "weight_versions": [],
        "untrainable": "redacted",
    }
)


def logged_group(request: str, second_answer: str) -> GroupRecord:
    record = replace(group("g"), request_json=CHAT.format(request))
    first, second = record.siblings
    return replace(record, siblings=[first, replace(second, text=second_answer)])


def read_again(
    folder: Path, record: GroupRecord, second_call: CapturedCall, *, redact: bool = True
) -> TrainableGroup:
    """Store a group without redaction, and read it for retraining. `second_call` is the call of its
    second answer."""
    ledger = Ledger.open(folder / "ledger.sqlite")
    ledger.record(record)
    ledger.settle("g", "pooled", None, 1, [[call()], [second_call]], "run")
    ledger.close()
    redaction = RedactionInUse(PrivacySettings(redact=("email",) if redact else ()))
    ledger = Ledger.open(folder / "ledger.sqlite", redaction=redaction)
    try:
        return GroupReader(ledger, "", None, HeldOutRows(), {}).read("g")
    finally:
        ledger.close()


def test_a_redacted_answer_is_left_out_and_the_others_of_its_group_can_be_trained(
    tmp_path: Path,
) -> None:
    record = logged_group("1+1?", "[redacted: email]")
    read = read_again(tmp_path, record, WITHOUT_TOKENS, redact=False)
    assert [len(own) for own in read.calls] == [1, 0]
    assert RecordedCall.from_log(read.calls[0][0]).untrainable is None


def test_an_answer_without_tokens_says_nothing_about_the_tokenizer(tmp_path: Path) -> None:
    record = logged_group("1+1?", "[redacted: email]")
    only_redacted = replace(record, siblings=record.siblings[1:])
    read = read_again(tmp_path, record, WITHOUT_TOKENS)
    assert plain_answer(replace(read, record=only_redacted)) is None
    assert plain_answer(read) is not None


def test_an_answer_that_was_stored_before_redaction_is_left_out(tmp_path: Path) -> None:
    read = read_again(tmp_path, logged_group("1+1?", "Ask ada@example.org."), call())
    assert [len(own) for own in read.calls] == [1, 0]


def test_a_request_that_was_stored_before_redaction_is_not_trained(tmp_path: Path) -> None:
    record = logged_group("I am ada@example.org.", "Hello")
    with pytest.raises(NotTrained, match=r"^redacted$"):
        read_again(tmp_path, record, call())
    assert len(read_again(tmp_path, record, call(), redact=False).calls) == 2
