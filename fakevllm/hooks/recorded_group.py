"""RecordedGroup, a group (a request with its answers) on which hooks can be run.

The group comes from the ledger, or is made up to check the hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from fakevllm.hooks.results import Json
from fakevllm.hooks.spec import Sibling, Task


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A request with its answers, on which hooks can be run.

    >>> RecordedGroup("g1", Task(), "1+1?", [{"content": "2", "finish_reason": "stop"}]).question
    '1+1?'
    """

    request_id: str
    task: Task
    question: str
    answers: list[Json]
    """The assistant messages, each with `finish_reason`."""
    usages: list[Json] = field(default_factory=list[Json])
    """Token usage of each answer; empty if unknown."""
    messages: Sequence[Json] = ()
    """The conversation before the answers."""
    indices: Sequence[int] = ()
    """Index of each answer among the answers that were sampled for the request. Empty if `answers`
    has all answers of the request."""

    def siblings(self) -> list[Sibling]:
        """Return the siblings (answers to the request) as the reward hook gets them in its argument
        `valid_results`."""
        usages = self.usages or [{} for _ in self.answers]
        indices = self.indices or range(len(self.answers))
        finishes = [answer.get("finish_reason") for answer in self.answers]
        return [
            Sibling(i, self.task, f"{self.request_id}/{i}", finish, usage, self.messages)
            for i, finish, usage in zip(indices, finishes, usages, strict=True)
        ]


def made_up_group() -> RecordedGroup:
    """Return a made-up request with four different answers: a normal answer, an empty answer, a
    tool call, and an answer that was cut off."""
    task = Task(main_query="What is 6 times 7?", task_id="made-up", metadata={"answer": "42"})
    function = {"name": "calculator", "arguments": '{"expression": "6*7"}'}
    tool_call = {"id": "call_1", "type": "function", "function": function}
    answers: list[Json] = [
        {"role": "assistant", "content": "6 times 7 is 42.\nAnswer: 42", "finish_reason": "stop"},
        {"role": "assistant", "content": "", "finish_reason": "stop"},
        {"role": "assistant", "tool_calls": [tool_call], "finish_reason": "tool_calls"},
        {"role": "assistant", "content": "Add 6 seven times: 6, 12, 18", "finish_reason": "length"},
    ]
    counts = (17, 1, 24, 32)
    usages: list[Json] = [{"prompt_tokens": 14, "completion_tokens": count} for count in counts]
    question: Json = {"role": "user", "content": task.main_query}
    return RecordedGroup("made-up-group", task, task.main_query, answers, usages, [question])


def messages_of(body: Json) -> list[Json]:
    """Return the messages of a chat request. The result is empty if the request has no list of
    messages.

    >>> messages_of({"messages": [{"role": "user"}]}), messages_of({"prompt": "Once"})
    ([{'role': 'user'}], [])
    """
    messages: object = body.get("messages")
    return cast(list[Json], messages) if isinstance(messages, list) else []
