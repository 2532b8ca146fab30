"""The formats of dataset files: their columns, and the row for a group. This module does no I/O.

The first columns of a format are those that TRL's trainers read. The trainers ignore the columns
that follow. Each group has at most one row. If a group has no row in a format, NotExported is
raised with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from fakevllm.export.columns import Columns, ColumnType, number
from fakevllm.export.conversation import Conversation, NotExported
from fakevllm.export.exported_group import ExportedGroup, message_of
from fakevllm.ledger.records import FeedbackRecord, GroupRecord, SiblingRecord

Json = dict[str, Any]

_CHAT: Columns = {
    "tools": ColumnType.OBJECTS,
    "chat_template_kwargs": ColumnType.OBJECT,
}
_PROMPT: Columns = {"prompt": ColumnType.OBJECTS}
_PLACE: Columns = {
    "group_id": ColumnType.TEXT,
    "session_id": ColumnType.TEXT,
    "turn": ColumnType.INTEGER,
    "step": ColumnType.INTEGER,
    "hook_hash": ColumnType.TEXT,
}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of dataset files."""

    columns: Columns
    row: Callable[[ExportedGroup, float], Json]
    """A function that returns the row for a group. Its second argument is the minimum difference
    between the rewards of two answers that form a preference pair."""


def row_of(row_format: RowFormat, group: ExportedGroup, min_difference: float = 0.0) -> Json:
    """Return the row for a group. Raises NotExported if the group has no row in this format."""
    row = row_format.row(group, min_difference)
    assert row.keys() == row_format.columns.keys(), "a row has the columns of its format"
    return row


def _messages(group: ExportedGroup, min_difference: float) -> Json:
    """Return the conversation with the served answer."""
    served = group.served
    if served.failure is not None:
        raise NotExported("unusable_answer")
    conversation = group.conversation
    return {
        "messages": [*conversation.messages, message_of(served)],
        **_chat(conversation),
        "reward": served.reward,
        **_place(group.record),
    }


def _sft(group: ExportedGroup, min_difference: float) -> Json:
    """Return the prompt with the user's corrected answer. If the user has corrected nothing, return
    the prompt with the best sibling."""
    if (edit := group.edit) is not None:
        completion, reward, source = edit, None, "edit"
    else:
        reward, best = group.best
        completion, source = message_of(best), "best"
    conversation = group.conversation
    return {
        "prompt": conversation.messages,
        "completion": [completion],
        **_chat(conversation),
        "reward": reward,
        "source": source,
        **_place(group.record),
    }


def _preference(group: ExportedGroup, min_difference: float) -> Json:
    """Return the prompt with a better and a worse answer."""
    chosen, rejected, rewards, source = _edited_pair(group) or _scored_pair(group, min_difference)
    conversation = group.conversation
    return {
        "prompt": conversation.messages,
        "chosen": [chosen],
        "rejected": [rejected],
        **_chat(conversation),
        "reward_chosen": rewards[0],
        "reward_rejected": rewards[1],
        "source": source,
        **_place(group.record),
    }


_Pair = tuple[Json, Json, tuple[float | None, float | None], str]
"""The chosen message and the rejected message, their rewards, and the source of the pair (`edit` or
`rewards`)."""


def _edited_pair(group: ExportedGroup) -> _Pair | None:
    """Return a pair of the user's corrected answer (chosen) and the served answer (rejected).
    Return None if the user has corrected nothing. A corrected answer has no reasoning. Therefore
    the reasoning of the served answer is left out too, because otherwise the model would learn not
    to reason.

    Raises NotExported if the corrected answer equals the served answer. In this case, the user
    approves of the served answer, so it must not become a rejected answer.
    """
    edit = group.edit
    if edit is None:
        return None
    served = group.served
    rejected = message_of(served)
    rejected.pop("reasoning_content", None)
    if edit == rejected:
        raise NotExported("equal_answers")
    return edit, rejected, (None, served.reward), "edit"


def _scored_pair(group: ExportedGroup, min_difference: float) -> _Pair:
    """Return a pair of the best sibling (chosen) and the sibling with the lowest reward (rejected).
    A sibling cannot be the rejected one if chat templates do not accept its message, or if its
    message equals the chosen message. In this case, the sibling with the next higher reward is
    tried."""
    high, best = group.best
    chosen = message_of(best)
    reason = NotExported("no_difference")
    for low, worst in sorted(group.scored, key=lambda pair: (pair[0], pair[1].index)):
        if high <= low or high - low < min_difference:
            break
        try:
            rejected = message_of(worst)
            if rejected != chosen:
                return chosen, rejected, (high, low), "rewards"
            reason = NotExported("equal_answers")
        except NotExported as error:
            reason = error
    raise reason


def _kto(group: ExportedGroup, min_difference: float) -> Json:
    """Return the prompt with the served answer and the user's verdict."""
    served, value = group.served, group.feedback_value
    if not value:
        raise NotExported("no_feedback")
    if value > 0 and served.failure is not None:
        raise NotExported("unusable_answer")
    conversation = group.conversation
    return {
        "prompt": conversation.messages,
        "completion": [message_of(served)],
        "label": value > 0,
        **_chat(conversation),
        "feedback": value,
        "reward": served.reward,
        **_place(group.record),
    }


def _group(group: ExportedGroup, min_difference: float) -> Json:
    """Return everything that the ledger has about a group, except tokens."""
    record = group.record
    try:
        conversation = group.conversation
    except NotExported:
        conversation = Conversation([], [], {})
    return {
        **_place(record),
        **{name: getattr(record, name) for name in _RECORD},
        "task": None if group.task is None else group.task.model_dump(include=_TASK),
        "messages": conversation.messages,
        **_chat(conversation),
        "siblings": [_sibling(sibling) for sibling in record.siblings],
        "feedback": [_feedback(row) for row in group.feedback],
    }


def _sibling(sibling: SiblingRecord) -> Json:
    fields = {name: getattr(sibling, name) for name in _SIBLING}
    fields["reward"] = number("reward", sibling.reward)
    try:
        message = None if sibling.message_json is None else message_of(sibling)
    except NotExported:
        message = None
    annotations = orjson.loads(sibling.annotations_json or "{}")
    return fields | {"message": message, "annotations": annotations}


def _feedback(row: FeedbackRecord) -> Json:
    return {name: getattr(row, name) for name in _FEEDBACK}


def _chat(conversation: Conversation) -> Json:
    return {
        "tools": conversation.tools or None,  # some templates announce tools for an empty list
        "chat_template_kwargs": conversation.template_kwargs,
    }


def _place(record: GroupRecord) -> Json:
    return {name: getattr(record, name) for name in _PLACE}


_RECORD: Columns = {
    "received_at": ColumnType.NUMBER,
    "route": ColumnType.TEXT,
    "model": ColumnType.TEXT,
    "app_key": ColumnType.TEXT,
    "task_id": ColumnType.TEXT,
    "question": ColumnType.TEXT,
    "request_json": ColumnType.TEXT,
    "kind": ColumnType.TEXT,
    "parent_id": ColumnType.TEXT,
    "status": ColumnType.INTEGER,
    "latency_s": ColumnType.NUMBER,
    "state": ColumnType.TEXT,
    "reason": ColumnType.TEXT,
    "served_index": ColumnType.INTEGER,
    "best_index": ColumnType.INTEGER,
    "served_by": ColumnType.TEXT,
    "propensity": ColumnType.NUMBER,
    "trained_step": ColumnType.INTEGER,
    "trained_version": ColumnType.INTEGER,
    "run_id": ColumnType.TEXT,
    "job_hash": ColumnType.TEXT,
    "arm": ColumnType.TEXT,
    "arm_propensity": ColumnType.NUMBER,
}
_TASK = {"main_query", "metadata"}
_SIBLING = (
    *("index", "served", "best", "trained", "status", "text", "message_json", "finish_reason"),
    *("failure", "error", "reward", "advantage", "prompt_tokens", "completion_tokens"),
)
_FEEDBACK = (
    *("feedback_id", "received_at", "kind", "score", "thumbs", "edited", "comment"),
    *("state", "reason", "value", "amount", "edit_state", "edit_reason"),
)

FORMATS: dict[str, RowFormat] = {
    "messages": RowFormat(
        {"messages": ColumnType.OBJECTS, **_CHAT, "reward": ColumnType.NUMBER, **_PLACE},
        _messages,
    ),
    "sft": RowFormat(
        {
            **_PROMPT,
            "completion": ColumnType.OBJECTS,
            **_CHAT,
            "reward": ColumnType.NUMBER,
            "source": ColumnType.TEXT,
            **_PLACE,
        },
        _sft,
    ),
    "preference": RowFormat(
        {
            **_PROMPT,
            "chosen": ColumnType.OBJECTS,
            "rejected": ColumnType.OBJECTS,
            **_CHAT,
            "reward_chosen": ColumnType.NUMBER,
            "reward_rejected": ColumnType.NUMBER,
            "source": ColumnType.TEXT,
            **_PLACE,
        },
        _preference,
    ),
    "kto": RowFormat(
        {
            **_PROMPT,
            "completion": ColumnType.OBJECTS,
            "label": ColumnType.FLAG,
            **_CHAT,
            "feedback": ColumnType.NUMBER,
            "reward": ColumnType.NUMBER,
            **_PLACE,
        },
        _kto,
    ),
    "groups": RowFormat(
        {
            **_PLACE,
            **_RECORD,
            "task": ColumnType.OBJECT,
            "messages": ColumnType.OBJECTS,
            **_CHAT,
            "siblings": ColumnType.OBJECTS,
            "feedback": ColumnType.OBJECTS,
        },
        _group,
    ),
}
"""The formats, by name. The flag --as accepts these names."""
