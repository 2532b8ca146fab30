"""The hook contract: everything that the author of a hook needs to know, on one screen.

A hook is a function of the user that the proxy calls. A hook has one of three names:
`on_user_submit_new_requests`, `on_compute_relative_reward` or `on_feedback`. A hook may be sync or
async. The flag `--hooks` of `fakevllm serve` names a folder with hook files, or one .py file. Hooks
run in a separate process, with a time limit. The output of a hook goes to the proxy's stderr.

If a hook fails, the app still gets its answer, and the ledger (the proxy's database) records the
reason. If one of the first two hooks fails, the request's answers are not trained. If `on_feedback`
fails, the feedback has no effect. Test your hooks with `fakevllm check-hook PATH`.
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
    """Position among the answers that were sampled for the request. 0 is the lead, the answer to
    the app's own, unchanged request."""
    task: Task
    """The dataset task to which the request belongs. All siblings of a request have the same task.
    The task's metadata has the reference answer, if there is one."""
    episode_id: str
    """Id of the answer, as `<group>/<index>`."""
    finish_reason: str | None
    """"stop", "length" (the answer was cut off) or "tool_calls"."""
    usage: Json = field(default_factory=dict[str, Any])
    """Numbers of tokens, as in the field `usage` of a chat completion."""
    messages: Sequence[Json] = ()
    """The conversation before this answer, as chat messages. All siblings of a request have the
    same messages. The field is empty if the app sent a prompt instead of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Feedback on an answer. The feedback is either explicit or implicit. Explicit feedback is sent
    by the app. Implicit feedback is the user's next request in the conversation.

    >>> Feedback(kind="feedback", request_id="g1", answer={"content": "7"}, thumbs="up").thumbs
    'up'
    """

    kind: Literal["feedback", "next_message", "regenerate"]
    """`feedback`: the app has sent feedback to POST /v1/feedback. `next_message`: the user has sent
    the next message of the conversation. `regenerate`: the user has requested another answer to the
    same message."""
    request_id: str
    """Id of the request that the answer belongs to."""
    answer: Json
    """The assistant message, with the additional key `finish_reason`."""
    question: str = ""
    """Text of the user message that was answered."""
    messages: Sequence[Json] = ()
    """The conversation before the answer."""
    task: Task = field(default_factory=Task)
    """The dataset task to which the request belongs."""
    reward: float | None = None
    """The answer's reward from on_compute_relative_reward; None if the answer has no reward."""
    score: float | None = None
    """Score that the app sent."""
    thumbs: Literal["up", "down"] | None = None
    """Thumbs that the app sent."""
    edited: str | None = None
    """The user's corrected version of the answer."""
    comment: str | None = None
    """Comment that the app sent."""
    next_message: str = ""
    """With `next_message`: the text of the user's next message. With `regenerate`: the text of the
    message that gets another answer. With `feedback`: empty."""


def on_user_submit_new_requests(request_id: str, task: Task) -> int | list[Json] | None:
    """Return the number of siblings (answers to sample for the request), or the request fields that
    each sibling changes. This hook is optional, and is called before the request is sent to the
    engine.

    * None keeps the configured number of siblings.
    * An int sets the number of siblings.
    * A list has one dict per sibling, with the request fields that this sibling changes, such as
      `{"temperature": 1.2}`. Item 0 of the list must be `{}`, because sibling 0 is the app's own,
      unchanged request. No sibling may change the fields that determine the form of the answer: n,
      stream, stream_options, logprobs, top_logprobs, prompt_logprobs, echo.
    """
    ...


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    """Return one reward for each item of `valid_results`, in the same order. This hook is required.

    `valid_results` has the siblings that did not fail. Siblings are the answers that were sampled
    for one request. `all_answers[i]` is the assistant message of `valid_results[i]`, with the
    additional key `finish_reason`. If the hook adds keys to this dict, the ledger (the proxy's
    database) stores the keys. `question` is the text of the last user message. A hook may be
    defined without the parameter `question`.

    A sibling with the reward None is not trained. With the default algorithm (`grpo`), only the
    differences between the rewards of one request's siblings matter. If all these rewards are
    equal, nothing is learned.
    """
    ...


def on_feedback(feedback: Feedback) -> float | None:
    """Return the value of the feedback, such as 1 for good and -1 for bad. This hook is optional.

    Return None if the feedback should have no effect.

    If this hook is not defined, the value is the feedback's `score`. If the feedback has no score,
    the value is 1 for thumbs up and -1 for thumbs down. Without this hook, all other feedback has
    no effect. The reason is that a next message or a regeneration does not show by itself whether
    the answer was good.
    """
    ...
