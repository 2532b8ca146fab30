"""The requests by which held-out rows are sampled. This module does no I/O.

By default, the row's text is the only message of its request. A row may have the whole request of
an app instead, with system prompt, earlier turns and tools, as an agent sends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task

REQUEST_FIELDS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format")
"""Fields of a row that are sent to the model, if the row has `messages`. Their form is that of a
request to /v1/chat/completions."""

Json = dict[str, Any]


def request_of(task: Task) -> Json:
    """Return the body by which a row is sampled, without the model.

    >>> request_of(Task(task_id="1", main_query="2 plus 3?"))
    {'messages': [{'role': 'user', 'content': '2 plus 3?'}]}
    >>> messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    >>> row = Task(task_id="1", main_query="Hi", metadata={"messages": messages, "answer": "Hello"})
    >>> request_of(row) == {"messages": messages}
    True
    """
    if "messages" not in task.metadata:
        return {"messages": [{"role": "user", "content": task.main_query}]}
    return {name: task.metadata[name] for name in REQUEST_FIELDS if name in task.metadata}


def check_requests(tasks: Iterable[Task], file: Path) -> None:
    """Raise ConfigError if the `messages` of a row cannot be a request."""
    for task in tasks:
        problem = _problem(task.metadata["messages"]) if "messages" in task.metadata else None
        if problem is not None:
            raise ConfigError(
                f"In {file}, the row {task.main_query[:60]!r} has `messages` that {problem}: give "
                "it the messages of a request to /v1/chat/completions, or none."
            )


def _problem(messages: object) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "are no list"
    each = cast(list[object], messages)
    if not all(isinstance(message, dict) for message in each):
        return "are no list of objects"
    if cast(Json, each[-1]).get("role") == "assistant":
        return "end with an answer"
    return None
