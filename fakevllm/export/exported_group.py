"""A group in the form that the exported dataset formats need: a request with its siblings (the
answers that were sampled for it), and the user's feedback. The data come from the ledger, the
proxy's database. This module does no I/O by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from fakevllm.export.columns import number
from fakevllm.export.conversation import Conversation, NotExported, chat_message, conversation_of
from fakevllm.export.user_feedback import edited_text, feedback_value
from fakevllm.ledger.records import BROKEN_OFF, FeedbackRecord, GroupRecord, SiblingRecord
from fakevllm_adapters.protocol.swarm import Task

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExportedGroup:
    """A group (a request with its sampled answers) with the user's feedback about the answer that
    the app got."""

    record: GroupRecord
    feedback: Sequence[FeedbackRecord]
    """All feedback about the served sibling, oldest first."""
    read_chat_request: Callable[[], Json | None]
    """A function that returns the request in the format of chat completions, or None if the request
    cannot be expressed in this format. A dataset format calls the function only if the group has an
    answer for the row."""
    task: Task | None = None
    """The dataset task of the group; None if the group has no task, or if the task is unknown."""

    @property
    def conversation(self) -> Conversation:
        """The conversation before the answer. Raises NotExported if the request cannot be expressed
        as chat messages, or if chat templates do not accept the conversation."""
        request = self.read_chat_request()
        if request is None:
            raise NotExported("no_messages")
        return conversation_of(request)

    @property
    def served(self) -> SiblingRecord:
        """The sibling (sampled answer) that the app got. Raises NotExported if the app got no
        complete answer."""
        for sibling in self.record.siblings:
            if sibling.served and sibling.message_json is not None:
                if sibling.failure == BROKEN_OFF:
                    break
                return sibling
        raise NotExported("no_answer")

    @property
    def scored(self) -> list[tuple[float, SiblingRecord]]:
        """Pairs (reward, sibling) for the siblings (sampled answers) that have a reward. Siblings
        without a reward are left out. Raises TypeError for a reward that is not a finite number."""
        return [
            (reward, sibling)
            for sibling in self.record.siblings
            if (reward := number("reward", sibling.reward)) is not None
            and sibling.message_json is not None
        ]

    @property
    def best(self) -> tuple[float, SiblingRecord]:
        """A pair: the highest reward of a usable sibling, and this sibling. A sibling is a sampled
        answer. A sibling is usable if the sibling has no recorded failure. If several usable
        siblings have the highest reward, the one that the app got takes precedence, and otherwise
        the one with the lowest index. Raises NotExported if no usable sibling has a reward."""
        if not self.scored:
            raise NotExported("no_reward")
        usable = [pair for pair in self.scored if pair[1].failure is None]
        if not usable:
            raise NotExported("unusable_answer")
        return max(usable, key=lambda pair: (pair[0], pair[1].served, -pair[1].index))

    @property
    def edit(self) -> Json | None:
        """The user's corrected answer as a message; None if the user has corrected nothing."""
        text = edited_text(self.feedback)
        return None if text is None else {"role": "assistant", "content": text}

    @property
    def feedback_value(self) -> float | None:
        """The value of the user's feedback about the answer that the app got; None if no feedback
        has a value."""
        return feedback_value(self.feedback)


def message_of(sibling: SiblingRecord) -> Json:
    """Return the message of a sibling (a sampled answer) in the form that chat templates expect.
    Raises NotExported if the message cannot be expressed in this form."""
    assert sibling.message_json is not None, "a sibling without an answer has no message"
    return chat_message({"role": "assistant"} | orjson.loads(sibling.message_json))
