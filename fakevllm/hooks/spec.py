"""The hook contract: everything a hook file needs to know, on one screen.

A hook is a plain function with one of the three names below, sync or async. `--hooks` names a
folder or one .py file. Hooks run in a process of their own with a time-out; what they print goes
to the proxy's stderr. Whatever goes wrong in a hook, the app still gets its answer: the group is
logged with the reason and does not train. Try yours with `fakevllm check-hook PATH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fakevllm_adapters.protocol.swarm import Task

__all__ = [
    "Feedback",
    "Json",
    "Sibling",
    "Task",
    "on_compute_relative_reward",
    "on_feedback",
    "on_user_submit_new_requests",
]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sibling:
    """One of the completions of one request.

    >>> Sibling(0, Task(metadata={"answer": "42"}), "g1/0", "stop").task.metadata["answer"]
    '42'
    """

    index: int
    """0 is the lead, the app's own request untouched."""
    task: Task
    """The same for all siblings of a group. A reference answer, where known, is in its metadata."""
    episode_id: str
    finish_reason: str | None
    """"stop", "length" (cut off), "tool_calls"."""
    usage: Json = field(default_factory=dict[str, Any])
    messages: Sequence[Json] = ()
    """The conversation before this answer, as chat messages; the same for all siblings of a group.
    Empty where the app gave a bare prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What was said of an answer that an app got, or what followed it.

    >>> Feedback(kind="feedback", request_id="g1", answer={"content": "7"}, thumbs="up").thumbs
    'up'
    """

    kind: Literal["feedback", "next_message", "regenerate"]
    """POST /v1/feedback; the session's next message; the same asked once more."""
    request_id: str
    """Of the answer's own request."""
    answer: Json
    """The assistant message, plus `finish_reason`."""
    question: str = ""
    messages: Sequence[Json] = ()
    """The conversation before the answer."""
    task: Task = field(default_factory=Task)
    reward: float | None = None
    """By on_compute_relative_reward."""
    score: float | None = None
    thumbs: Literal["up", "down"] | None = None
    edited: str | None = None
    """What the answer should have been."""
    comment: str | None = None
    next_message: str = ""
    """What was asked next, or once more."""


def on_user_submit_new_requests(request_id: str, task: Task) -> int | list[Json] | None:
    """Optional. Called before a request goes out: how many siblings, and what each may change.

    None keeps the configured N. An int sets N. A list has one dict of request fields per sibling,
    such as `{"temperature": 1.2}`; item 0 must be `{}`, for the lead carries the app's own request.
    What shapes the answer is the app's alone: n, stream, stream_options, logprobs, echo.
    """
    ...


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    """Required. Scores the siblings that answered, in order: a number each, or None: do not train.

    `all_answers[i]` is the assistant message of `valid_results[i]` plus `finish_reason`; keys added
    to it are kept in the ledger. `question` is the text of the last user message; a hook with two
    parameters is called without it. Only differences inside the group count: a group whose rewards
    are all equal teaches nothing.
    """
    ...


def on_feedback(feedback: Feedback) -> float | None:
    """Optional. What it counts for: a number, 1 for good and -1 for bad, or None: nothing.

    Without it `score` counts as it is, thumbs as 1 or -1, and all else for nothing: missing
    feedback, and a user who goes on or asks again, say nothing bad by themselves.
    """
    ...
