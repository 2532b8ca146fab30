"""The hook contract: everything a hook file needs to know, on one screen.

A hook is a plain function with one of the two names below, sync or async. `--hooks` names a folder
or one .py file. Hooks run in a process of their own with a time-out; what they print goes to the
proxy's stderr. Whatever goes wrong in a hook, the app still gets its answer: the group is logged
with the reason and does not train. Try yours with `fakevllm check-hook PATH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fakevllm_adapters.swarm import Task

__all__ = ["Json", "Sibling", "Task", "on_compute_relative_reward", "on_user_submit_new_requests"]

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


def on_user_submit_new_requests(request_id: str, task: Task) -> int | list[Json] | None:
    """Optional. Called before a request goes out: how many siblings, and what each may change.

    None keeps the configured N. An int sets N. A list has one dict of request fields per sibling,
    such as `{"temperature": 1.2}`; item 0 must be `{}`, for the lead carries the app's own request.
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
