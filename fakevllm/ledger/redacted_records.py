"""Redaction of everything that is written to the ledger (the proxy's database). The thread that
writes the ledger also redacts, so that no request waits for the redaction."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import orjson
from sqlalchemy import Connection

from fakevllm.ledger import reads
from fakevllm.ledger.records import (
    FeedbackRecord,
    GroupRecord,
    KeptAnswer,
    SiblingRecord,
    StoredResponse,
)
from fakevllm_adapters.privacy.continued_text import continued_texts
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.patterns import MARKER
from fakevllm_adapters.protocol.swarm import CapturedCall, Task

REDACTED = "redacted"
"""Value of `calls.untrainable` for a call whose tokens are not stored."""
_NO_TEXTS = frozenset(
    {
        *("group_id", "parent_id", "app_key", "hook_hash", "run_id", "job_hash", "state"),
        *("eval_id", "task_id", "asked_key", "kind", "evidence", "arm", "served_by"),
    }
)
"""Columns with ids, digests and states of the proxy or the server, and the ids of tasks."""
_APP_IDS = frozenset({"response_id", "answer_id", "session_id", "parent_session_id"})
"""Columns with ids that an app may choose, and by which it refers to an answer or a session."""
_JSON = frozenset({"request_json", "message_json", "tool_calls_json", "annotations_json"})
_ANSWER = frozenset({"text", "message_json", "tool_calls_json"})
"""Columns of a sibling that have the model's answer."""
_MESSAGE_TEXTS = ("content", "reasoning", "reasoning_content", "text")
_WELL_FORMED = re.compile(
    r"(?:[A-Za-z]{1,20}[-_]){0,3}"
    r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{24,64})(?:[-_]\d{1,6})?",
    re.IGNORECASE,
)
"""UUIDs and other random ids in hex, also with a prefix such as `chatcmpl-`. They are never
redacted, although their digits may look like another number."""


class PartsToRedact(NamedTuple):
    """The parts of a group (a request with its sampled answers) with a text to redact."""

    has_request: bool
    siblings: frozenset[int]
    """Indices of the siblings (sampled answers)."""


class RecordRedactor:
    """Redacts records before they are written to the ledger (the proxy's database)."""

    def __init__(self, redaction: RedactionInUse, id_secret: bytes = b"") -> None:
        """Create the redactor. An id that matches a redaction pattern is replaced by its keyed
        hash. `id_secret` is the key of this hash."""
        self._redaction = redaction
        self._id_secret = id_secret

    def group(self, record: GroupRecord) -> GroupRecord:
        """Return the record of a group without the texts that are redacted.

        If the request is redacted, the returned record has no hash of the conversation. If the
        request or an answer is redacted, the returned record does not keep an answer for a retry of
        the request.
        """
        if not self._redaction.redactor:
            return record
        changed = self._columns(record)
        if "request_json" in changed or "question" in changed:
            changed["asked_key"] = None
        ends = continued_texts(_parsed(record.request_json))
        siblings = [self._sibling(sibling, ends) for sibling in record.siblings]
        pairs = zip(siblings, record.siblings, strict=True)
        if not changed and all(new is old for new, old in pairs):
            return record
        return replace(record, **changed, siblings=siblings, kept_answer=None)

    def parts_to_redact(self, record: GroupRecord) -> PartsToRedact:
        """Return the parts of a stored group that would be redacted if the group were stored now.
        For example, the group may have been stored before redaction was turned on."""
        new = self.group(record)
        pairs = zip(new.siblings, record.siblings, strict=True)
        return PartsToRedact(
            new.request_json != record.request_json,
            frozenset(old.index for changed, old in pairs if changed != old),
        )

    def _sibling(self, sibling: SiblingRecord, ends: Sequence[str]) -> SiblingRecord:
        changed = self._columns(sibling)
        new = replace(sibling, **changed) if changed else sibling
        for end in ends:
            new = self._continued(new, end)
        return new

    def _continued(self, sibling: SiblingRecord, end: str) -> SiblingRecord:
        """Redact the beginning of an answer if text to redact begins in the prompt and continues in
        the answer. `end` is the end of the prompt."""
        redactor = self._redaction.redactor
        text = None if sibling.text is None else redactor.continued(end, sibling.text)
        parsed = None if sibling.message_json is None else _parsed(sibling.message_json)
        message = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
        new = {
            name: redactor.continued(end, message[name])
            for name in _MESSAGE_TEXTS
            if isinstance(message.get(name), str)
        }
        if text == sibling.text and new == {name: message[name] for name in new}:
            return sibling
        message_json = orjson.dumps(message | new).decode() if message else sibling.message_json
        return replace(sibling, text=text, message_json=message_json)

    def _columns(self, record: Any) -> dict[str, Any]:
        """Return the columns of a record that redaction changes, by name, with their redacted
        values."""
        redactor = self._redaction.redactor
        changed: dict[str, Any] = {}
        for field in fields(record):
            name, value = field.name, getattr(record, field.name)
            if not isinstance(value, str) or name in _NO_TEXTS:
                continue
            if name in _APP_IDS:
                text = self.id(value)
            elif name == "request_json":
                text = self._document(value, "previous_response_id")
            else:
                text = redactor.json_text(value) if name in _JSON else redactor.text(value)
            if text != value:
                changed[name] = text
        return changed

    def _document(self, text: str, id_field: str) -> str:
        """Return the text of a JSON object, redacted. The app's id in the field `id_field` is
        redacted by the method `id`, so that the app can still use this id."""
        redacted = self._redaction.redactor.json_text(text)
        if redacted == text:
            return text
        before, after = _parsed(text), _parsed(redacted)
        if not isinstance(before, dict) or not isinstance(after, dict):
            return redacted
        app_id = cast("dict[str, Any]", before).get(id_field)
        if not isinstance(app_id, str):
            return redacted
        document = cast("dict[str, Any]", after) | {id_field: self.id(app_id)}
        return orjson.dumps(document).decode()

    def id(self, value: str) -> str:
        """Return an id that an app has chosen, unchanged or redacted. An id that matches a
        redaction pattern is replaced by its keyed hash. Random ids such as UUIDs are never
        replaced. The same id always gets the same hash, so that the app can use the id later."""
        redactor = self._redaction.redactor
        if not redactor or _WELL_FORMED.fullmatch(value) or not redactor.finds(value):
            return value
        return hashed_id(self._id_secret, value)

    def calls(
        self, db: Connection, group_id: str, calls: Sequence[Sequence[CapturedCall]]
    ) -> Sequence[Sequence[CapturedCall]]:
        """Return the captured model calls of a group, without the tokens of redacted texts. If the
        request has redacted text in the ledger, all calls lose their tokens. If an answer has
        redacted text, the calls of this answer lose their tokens.

        The server itself removes the tokens of calls in which it finds text to redact. This method
        also covers text that only the proxy redacts.
        """
        if not self._redaction.redactor or not calls:
            return calls
        if self._is_redacted(db, reads.REQUEST_TEXTS, group_id):
            return [[_without_tokens(call) for call in own] for own in calls]
        rows = db.exec_driver_sql(reads.ANSWER_TEXTS, (group_id,)).all()
        redacted = {row[0] for row in rows if has_marker(row[1:])}
        return [
            [_without_tokens(call) for call in own] if index in redacted else own
            for index, own in enumerate(calls)
        ]

    def _is_redacted(self, db: Connection, query: str, group_id: str) -> bool:
        return any(has_marker(row) for row in db.exec_driver_sql(query, (group_id,)).all())

    def text(self, text: str) -> str:
        """Return a text, redacted."""
        return self._redaction.redactor.text(text)

    def json_text(self, text: str) -> str:
        """Return the text of a JSON document, redacted."""
        return self._redaction.redactor.json_text(text)

    def feedback(self, row: FeedbackRecord) -> FeedbackRecord:
        """Return a row of feedback with the user's comment and corrected text redacted."""
        redactor = self._redaction.redactor
        if not redactor:
            return row
        comment = None if row.comment is None else redactor.text(row.comment)
        edited = None if row.edited is None else redactor.text(row.edited)
        return replace(row, comment=comment, edited=edited)

    def response(self, response: StoredResponse) -> StoredResponse:
        """Return a response without the texts that are redacted."""
        if not self._redaction.redactor:
            return response
        response_id, body = self.id(response.response_id), response.body
        if body is not None:
            body = self._document(body.decode(errors="replace"), "id").encode()
        return replace(response, response_id=response_id, body=body)

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

    def may_keep(self, db: Connection, answer: KeptAnswer) -> bool:
        """Return True if an answer may be written to the ledger for a retry. If the request or the
        answer has text that is redacted, the answer is kept in memory only, because a retry must
        get the whole text."""
        if not self._redaction.redactor:
            return True
        queries = (reads.REQUEST_TEXTS, reads.ANSWER_TEXTS)
        if any(self._is_redacted(db, query, answer.group_id) for query in queries):
            return False
        return not self._redaction.redactor.finds_in_body(answer.body)


def hashed_id(secret: bytes, value: str) -> str:
    """Return the keyed hash that replaces an id with text to redact."""
    return f"{REDACTED}-{hmac.digest(secret, value.encode(), 'sha256').hex()[:32]}"


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def has_marker(values: Sequence[object]) -> bool:
    """Return True if one of the values is a text with the marker of a redaction."""
    return any(isinstance(value, str) and MARKER.search(value) for value in values)


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
