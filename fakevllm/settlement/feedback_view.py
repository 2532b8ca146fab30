"""The argument of the `on_feedback` hook: an answered request, and feedback about the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import orjson

from fakevllm.hooks.spec import Feedback
from fakevllm.ledger.conversation_history import recorded_messages
from fakevllm.ledger.records import FeedbackRecord, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class FeedbackSubject:
    """An answered request about which the app has sent feedback."""

    group: GroupRecord
    messages: list[dict[str, Any]]
    """The conversation before the answer, in the same form as the reward hook gets it."""


def read_subject(ledger: Ledger, group_id: str) -> FeedbackSubject | None:
    """Read a group (an app's request with its sampled answers) from the ledger, the proxy's
    database. Return None if the ledger does not have the group, or if the app got no answer. This
    function blocks while it reads."""
    group = ledger.group(group_id)
    if group is None or group.served_index is None:
        return None
    key = group.app_key
    messages = recorded_messages(
        group.route, group.request_json, lambda name: ledger.answered_request(name, key)
    )
    return FeedbackSubject(group, messages)


def hook_argument(
    subject: FeedbackSubject, task: Task | None, row: FeedbackRecord, next_message: str = ""
) -> Feedback:
    """Return the argument of the `on_feedback` hook. For implicit feedback, `next_message` is the
    user's message after the answer, because this message is the feedback. For explicit feedback,
    `next_message` is ""."""
    group = subject.group
    served = next(sibling for sibling in group.siblings if sibling.served)
    answer: dict[str, Any] = orjson.loads(served.message_json or "{}")
    return Feedback(
        kind=cast(Any, row.kind),
        request_id=group.group_id,
        answer=answer | {"finish_reason": served.finish_reason},
        question=group.question,
        messages=subject.messages,
        task=task or Task(main_query=group.question),
        reward=served.reward,
        score=row.score,
        thumbs=cast(Any, row.thumbs),
        edited=row.edited,
        comment=row.comment,
        next_message=next_message,
    )
