"""Read groups (requests with their sampled answers) from the ledger, the proxy's database. Groups
that quote a held-out dataset row are refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, cast

import orjson

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.export.conversation import NotExported
from fakevllm.export.exported_group import ExportedGroup
from fakevllm.hooks.recorded_group import messages_of
from fakevllm.ledger.records import FeedbackRecord, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.settlement.held_out_groups import HELD_OUT
from fakevllm_adapters.formats.chat import text_of
from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_adapters.protocol.swarm import Task

Json = dict[str, Any]


class GroupReader:
    """A reader of the groups (requests with their sampled answers) in one ledger, the proxy's
    database. The reader never returns a group that quotes a held-out dataset row.

    The ledger records for some groups that they quote a held-out row, but not for all. The record
    may have another reason why the group was not trained, such as `paused`. The row may also have
    been held out after the group was recorded. Therefore all texts that the model did not write are
    searched for held-out rows, including the texts of the user's feedback.
    """

    def __init__(self, ledger: Ledger, held_out: HeldOutRows, tasks: Mapping[str, Task]) -> None:
        """Create the reader. `tasks` maps the id of each task to the task of the dataset file. The
        ledger, the proxy's database, does not contain these tasks."""
        self._ledger = ledger
        self._held_out = held_out
        self._tasks = tasks

    def read(self, group_id: str) -> ExportedGroup:
        """Return a group (a request with its sampled answers) with the user's feedback. Raises
        NotExported if the group quotes a held-out dataset row, or if its contents were deleted.
        Raises one of READ_ERRORS if its records in the ledger (the proxy's database) are
        damaged."""
        record = self._ledger.group(group_id)
        if record is None:
            raise KeyError("the group is not in the ledger any more")
        if self._ledger.forgotten.contains(group_id):
            raise NotExported(FORGOTTEN)
        feedback = self._ledger.feedback.of_group(group_id)
        if any(_has_held_out_reason(row) for row in (record, *feedback)):
            raise NotExported(HELD_OUT)
        task = self._ledger.task(record.task_id, self._tasks) if record.task_id else None
        read_chat_request = cache(partial(self._ledger.chat_request, record))
        if self._held_out:
            texts = self._ledger.user_texts(group_id, task)
            request = read_chat_request()
            raw: object = orjson.loads(record.request_json) if request is None else None
            texts += _texts_of(raw) if request is None else _message_texts(request)
            texts += [text for row in feedback for text in (row.edited, row.comment) if text]
            if self._held_out.are_quoted(*texts):
                raise NotExported(HELD_OUT)
        return ExportedGroup(record, feedback, read_chat_request, task)


def _has_held_out_reason(row: GroupRecord | FeedbackRecord) -> bool:
    return (row.reason or "").partition(":")[0] == HELD_OUT


def _message_texts(request: Json) -> list[str]:
    """Return the texts of all messages of a request, except the messages of the model. These texts
    are searched for held-out dataset rows. The first and the last user message would not be enough,
    because an exported row has the whole conversation."""
    return [
        text_of(message.get("content"))
        for message in messages_of(request)
        if message.get("role") != "assistant"
    ]


def _texts_of(value: object) -> list[str]:
    """Return all texts in a JSON value, at any depth. The value is a request that cannot be
    translated to chat completions, so its texts may be in any field.

    >>> _texts_of({"input": ["a", {"b": "c", "d": 1}]})
    ['a', 'c']
    """
    texts: list[str] = []
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, dict):
            open_values += reversed(cast(Json, one).values())
        elif isinstance(one, list):
            open_values += reversed(cast(list[object], one))
    return texts
