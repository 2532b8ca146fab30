"""Logged groups in the form in which hooks get groups: with the whole conversation and the task. A
group is a request with the answers (siblings) that were sampled for it. The methods block the
thread, so do not call them on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Engine, select

from fakevllm.hooks.recorded_group import RecordedGroup
from fakevllm.ledger.conversation_history import recorded_messages
from fakevllm.ledger.group_reads import GroupReads
from fakevllm.ledger.reads import ANSWERED
from fakevllm.ledger.records import BROKEN_OFF, AnsweredRequest, GroupRecord, SiblingRecord
from fakevllm.ledger.tables import TASKS
from fakevllm_adapters.protocol.swarm import Task


class RecordedGroups:
    """A reader of groups, in the form in which hooks get groups."""

    def __init__(self, read_engine: Engine, stored_id: Callable[[str], str]) -> None:
        """Create the reader. `stored_id` returns the form in which the ledger stores an id that an
        app has chosen."""
        self._read_engine = read_engine
        self._stored_id = stored_id
        self.group = GroupReads(read_engine).group

    def answered_request(self, response_id: str, app_key: str | None) -> AnsweredRequest | None:
        """Return the app's latest request whose answer has this response id, or None.

        `app_key` is the fingerprint of the app's API key. There may be several such requests,
        because an app may choose the response id itself and may use one id twice.
        """
        with self._read_engine.connect() as db:
            row = db.exec_driver_sql(
                ANSWERED, (self._stored_id(response_id), app_key)
            ).one_or_none()
        return None if row is None else AnsweredRequest(*row)

    def task(self, task_id: str, rows: Mapping[str, Task] | None = None) -> Task | None:
        """Return the dataset task with this id. `rows` are the rows of a dataset file, by id. If
        `rows` does not have the id, the task that was registered at the proxy is returned. Return
        None if there is no such task."""
        if rows and task_id in rows:
            return rows[task_id]
        with self._read_engine.connect() as db:
            query = select(TASKS).where(TASKS.c.task_id == task_id)
            row = db.execute(query).mappings().one_or_none()
        return None if row is None else task_from_row(row)

    def task_of(self, group: GroupRecord) -> Task:
        """Return the task of a group. If the task is unknown, return a task whose text is the
        group's question. Live requests without a known task are treated in the same way."""
        task_id = group.task_id or ""
        found = self.task(task_id) if task_id else None
        return found or Task(task_id=task_id, main_query=group.question)

    def recorded(self, group: GroupRecord, task: Task | None = None) -> RecordedGroup:
        """Return a group in the form in which the reward hook gets groups. Answers that the engine
        broke off are left out, because hooks never get them.

        `task` is the group's dataset task, if the caller knows it.
        """
        answers = [
            sibling
            for sibling in group.siblings
            if sibling.message_json is not None and sibling.failure != BROKEN_OFF
        ]
        find_request = partial(self.answered_request, app_key=group.app_key)
        return RecordedGroup(
            request_id=group.group_id,
            task=task or self.task_of(group),
            question=group.question,
            answers=[_message(sibling) for sibling in answers],
            usages=[_usage(sibling) for sibling in answers],
            messages=recorded_messages(group.route, group.request_json, find_request),
            indices=[sibling.index for sibling in answers],
        )


def task_from_row(row: Any) -> Task:
    """Return the task in a row of the table `tasks`."""
    metadata = orjson.loads(row["metadata_json"])
    return Task(task_id=row["task_id"], main_query=row["main_query"], metadata=metadata)


def _message(sibling: SiblingRecord) -> dict[str, Any]:
    message: dict[str, Any] = orjson.loads(sibling.message_json or "{}")
    return message | {"finish_reason": sibling.finish_reason}


def _usage(sibling: SiblingRecord) -> dict[str, Any]:
    counts = {
        "prompt_tokens": sibling.prompt_tokens,
        "completion_tokens": sibling.completion_tokens,
    }
    return {key: value for key, value in counts.items() if value is not None}
