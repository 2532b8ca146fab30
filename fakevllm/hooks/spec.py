"""The hook contract: everything that the author of a hook needs to know, on one screen.

A hook is a function with one of the three names below. It may be sync or async. The flag `--hooks`
names a folder with hook files, or one .py file. Hooks run in a process of their own, with a time
limit. The output of a hook goes to the proxy's stderr. If a hook fails, the app still gets its
answer. The ledger then records the group with the reason, and the group is not trained. Try your
hooks with `fakevllm check-hook PATH`.
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
    """One of the answers that were sampled for one request.

    >>> Sibling(0, Task(metadata={"answer": "42"}), "g1/0", "stop").task.metadata["answer"]
    '42'
    """

    index: int
    """Position in the group. 0 is the lead: the app's own request, unchanged."""
    task: Task
    """The task, the same for all siblings of a group. Its metadata has the reference answer, if
    there is one."""
    episode_id: str
    finish_reason: str | None
    """"stop", "length" (the answer was cut off) or "tool_calls"."""
    usage: Json = field(default_factory=dict[str, Any])
    messages: Sequence[Json] = ()
    """The conversation before this answer, as chat messages; the same for all siblings of a group.
    Empty if the app sent a prompt without messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Feedback on an answer. It is explicit feedback of the app, or the user's next request, which
    counts as implicit feedback.

    >>> Feedback(kind="feedback", request_id="g1", answer={"content": "7"}, thumbs="up").thumbs
    'up'
    """

    kind: Literal["feedback", "next_message", "regenerate"]
    """`feedback`: the app sent it to POST /v1/feedback. `next_message`: the session's next message.
    `regenerate`: the same request once more."""
    request_id: str
    """Id of the request that the answer belongs to."""
    answer: Json
    """The assistant message, plus `finish_reason`."""
    question: str = ""
    messages: Sequence[Json] = ()
    """The conversation before the answer."""
    task: Task = field(default_factory=Task)
    reward: float | None = None
    """The answer's reward from on_compute_relative_reward."""
    score: float | None = None
    thumbs: Literal["up", "down"] | None = None
    edited: str | None = None
    """The user's corrected version of the answer."""
    comment: str | None = None
    next_message: str = ""
    """The text of the next message, or of the repeated request."""


def on_user_submit_new_requests(request_id: str, task: Task) -> int | list[Json] | None:
    """Return the number of siblings, or the request fields that each sibling changes. This hook is
    optional.

    The hook is called before the request is sent to the engine. None keeps the configured number of
    siblings, and an int sets the number. A list has one dict of request fields per sibling, such as
    `{"temperature": 1.2}`. Item 0 of the list must be `{}`, because sibling 0 is the app's own
    request. No sibling may change the fields that determine the form of the answer: n, stream,
    stream_options, logprobs, top_logprobs, prompt_logprobs, echo.
    """
    ...


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    """Return one reward per sibling that answered, in the order of `valid_results`. This hook is
    required.

    A sibling with the reward None is not trained. `all_answers[i]` is the assistant message of
    `valid_results[i]`, plus the key `finish_reason`. If you add keys to it, the ledger stores them.
    `question` is the text of the last user message. A hook may leave this parameter out. Only the
    differences between the rewards of one group matter: if all rewards are equal, nothing is
    learned.
    """
    ...


def on_feedback(feedback: Feedback) -> float | None:
    """Return the value of the feedback, such as 1 for good and -1 for bad. This hook is optional.

    None means that the feedback has no value and no effect.

    If this hook is not defined, the value is the feedback's `score`. Without a score, it is 1 for
    thumbs up and -1 for thumbs down. All other feedback has no value, because missing feedback, a
    next message or a regeneration is not bad by itself.
    """
    ...
