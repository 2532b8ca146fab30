"""Redaction of everything that is written to the ledger. The writer's thread redacts, so that no
request waits for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from fakevllm.ledger.records import (
    FeedbackRecord,
    GroupRecord,
    KeptAnswer,
    SiblingRecord,
    StoredResponse,
)
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.protocol.swarm import CapturedCall, Task

REDACTED = "redacted"
"""Value of `calls.untrainable` for a call whose tokens are not stored."""
MAX_REMEMBERED = 10_000
"""Maximum number of groups whose redacted siblings are remembered until their calls arrive."""

_IDS = frozenset(
    {
        "group_id",
        "parent_id",
        "app_key",
        "hook_hash",
        "run_id",
        "job_hash",
        "state",
        "eval_id",
        "feedback_id",
    }
)
"""Columns with ids, digests and states of the proxy or the server. They have no text of an app."""
_JSON = frozenset({"request_json", "message_json", "tool_calls_json", "annotations_json"})
_ALL = -1
"""Stands for all siblings of a group, because the group's request was redacted."""


class RecordRedactor:
    """The redaction of the ledger's rows."""

    def __init__(self, redaction: RedactionInUse) -> None:
        self._redaction = redaction
        self._redacted: OrderedDict[str, frozenset[int]] = OrderedDict()
        """Indices of the redacted siblings by group id."""

    def group(self, record: GroupRecord) -> GroupRecord:
        """Return the record of a group without the texts that are redacted.

        If the request is redacted, the record has neither a hash of the conversation nor an answer
        that is kept for a retry.
        """
        if not self._redaction.redactor:
            return record
        changed = self._columns(record)
        siblings = [self._sibling(sibling) for sibling in record.siblings]
        indices = {
            new.index for new, old in zip(siblings, record.siblings, strict=True) if new is not old
        }
        if changed:
            indices.add(_ALL)
            changed["asked_key"] = None
        if not indices:
            return record
        self._redacted[record.group_id] = frozenset(indices)
        while len(self._redacted) > MAX_REMEMBERED:
            self._redacted.popitem(last=False)
        return replace(record, **changed, siblings=siblings, kept_answer=None)

    def _sibling(self, sibling: SiblingRecord) -> SiblingRecord:
        changed = self._columns(sibling)
        return replace(sibling, **changed) if changed else sibling

    def _columns(self, record: Any) -> dict[str, Any]:
        """Return the columns of a record that are redacted, with their new values."""
        redactor = self._redaction.redactor
        changed: dict[str, Any] = {}
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, str) and field.name not in _IDS:
                is_json = field.name in _JSON
                text = redactor.json_text(value) if is_json else redactor.text(value)
                if text != value:
                    changed[field.name] = text
        return changed

    def calls(
        self, group_id: str, calls: Sequence[Sequence[CapturedCall]]
    ) -> Sequence[Sequence[CapturedCall]]:
        """Return the calls of a group without the tokens of redacted siblings. The server removes
        the tokens that it finds itself; this covers what only the proxy redacts."""
        redacted = self._redacted.get(group_id)
        if redacted is None:
            return calls
        return [
            [_without_tokens(call) for call in own] if redacted & {index, _ALL} else own
            for index, own in enumerate(calls)
        ]

    def text(self, text: str) -> str:
        """Return a text, redacted."""
        return self._redaction.redactor.text(text)

    def feedback(self, row: FeedbackRecord) -> FeedbackRecord:
        """Return a row of feedback without the texts that are redacted."""
        changed = self._columns(row) if self._redaction.redactor else None
        return replace(row, **changed) if changed else row

    def response(self, response: StoredResponse) -> StoredResponse:
        """Return a response without the texts that are redacted."""
        if not self._redaction.redactor or response.body is None:
            return response
        text = response.body.decode(errors="replace")
        return replace(response, body=self._redaction.redactor.json_text(text).encode())

    def task(self, task: Task) -> Task:
        """Return a dataset task without the texts that are redacted."""
        redactor = self._redaction.redactor
        if not redactor:
            return task
        fields = {
            "main_query": redactor.text(task.main_query),
            "metadata": redactor.value(task.metadata),
        }
        return task.model_copy(update=fields)

    def may_keep(self, answer: KeptAnswer) -> bool:
        """Return True if an answer may be kept for a retry. An answer with redacted text is kept in
        memory only, because the app must get the whole text."""
        is_redacted = answer.group_id in self._redacted
        return not (is_redacted or self._redaction.redactor.finds_in_body(answer.body))


def _without_tokens(call: CapturedCall) -> CapturedCall:
    return call.model_copy(
        update={
            "prompt_ids": "",
            "prompt": None,
            "response_ids": "",
            "logprobs": None,
            "weight_versions": [],
            "untrainable": REDACTED,
        }
    )
