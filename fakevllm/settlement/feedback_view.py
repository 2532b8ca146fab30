"""An answer and what is said of it, as on_feedback gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import orjson

from fakevllm.hooks.spec import Feedback
from fakevllm.ledger.prior_answers import recorded_messages
from fakevllm.ledger.records import FeedbackRecord, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that got an answer."""

    group: GroupRecord
    messages: list[dict[str, Any]]
    """The conversation before it, as the reward hook was shown it."""


def answered_in(ledger: Ledger, group_id: str) -> Answered | None:
    """Blocks. None where the group is not in the ledger, or nothing was served."""
    group = ledger.group(group_id)
    if group is None or group.served_index is None:
        return None
    key = group.app_key
    messages = recorded_messages(
        group.route, group.request_json, lambda name: ledger.answered_request(name, key)
    )
    return Answered(group, messages)


def shown(of: Answered, task: Task | None, row: FeedbackRecord, text: str = "") -> Feedback:
    """`text`: what the user wrote next."""
    group = of.group
    served = next(one for one in group.siblings if one.served)
    answer: dict[str, Any] = orjson.loads(served.message_json or "{}")
    return Feedback(
        kind=cast(Any, row.kind),
        request_id=group.group_id,
        answer=answer | {"finish_reason": served.finish_reason},
        question=group.question,
        messages=of.messages,
        task=task or Task(main_query=group.question),
        reward=served.reward,
        score=row.score,
        thumbs=cast(Any, row.thumbs),
        edited=row.edited,
        comment=row.comment,
        next_message=text,
    )
