"""Build a chat request from a dataset row. The row is a held-out row, or a row of a replay.

If a row has no field `messages`, the row's text is the only message of the request. A row with this
field contains a whole request as an agent sends it, with system prompt, earlier turns and tools.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from fakevllm.admission.dataset import read_tasks
from fakevllm.admission.held_out import HeldOutRows
from fakevllm.errors import ConfigError
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.swarm import Task

REQUEST_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "chat_template_kwargs",
)
"""Fields of a row that are sent to the model if the row has the field `messages`. The fields have
the form of a request to /v1/chat/completions."""
_SYSTEM_ROLES = ("system", "developer")

Json = dict[str, Any]


def request_of(task: Task) -> Json:
    """Return the body of the chat request that asks for an answer to a dataset row. The field
    `model` is left out.

    >>> request_of(Task(task_id="1", main_query="2 plus 3?"))
    {'messages': [{'role': 'user', 'content': '2 plus 3?'}]}
    >>> messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    >>> row = Task(task_id="1", main_query="Hi", metadata={"messages": messages, "answer": "Hello"})
    >>> request_of(row) == {"messages": messages}
    True
    """
    if task.metadata.get("messages") is None:
        return {"messages": [{"role": "user", "content": task.main_query}]}
    return {name: task.metadata[name] for name in REQUEST_FIELDS if name in task.metadata}


def read_held_out_rows(file: Path, field: str) -> HeldOutRows:
    """Return the rows of the held-out dataset (`release.eval_dataset`). Raises ConfigError if the
    file cannot be read, if it has no rows, or if one of its rows fails the checks of
    `check_requests`.
    """
    tasks = read_tasks(file, field)
    if not tasks:
        raise ConfigError(
            f"The held-out dataset {file} has no rows: write one JSON object per line, or remove "
            "release.eval_dataset."
        )
    check_requests(tasks, file)
    return HeldOutRows(tasks)


def check_messages(tasks: Iterable[Task], file: Path) -> None:
    """Check that dataset rows can be sent as requests. Raises ConfigError if a row has a field
    `messages` that is not valid in a request."""
    for task in tasks:
        problem = _request_problem(task)
        if problem is not None:
            raise ConfigError(_named(task, file, problem))


def check_requests(tasks: Iterable[Task], file: Path) -> None:
    """Check that held-out rows can be sampled, and can be recognised in requests of apps. Raises
    ConfigError if a row has no text. Raises ConfigError as well if a row's `messages` are not valid
    in a request, or do not contain the row's text.
    """
    for task in tasks:
        problem = _problem(task)
        if problem is not None:
            raise ConfigError(_named(task, file, problem))


def _problem(task: Task) -> str | None:
    if not task.main_query.strip():
        return "has no text, by which requests of your app are recognised: give it one"
    problem = _request_problem(task)
    if problem is not None:
        return problem
    messages = task.metadata.get("messages")
    if messages is None:
        return None
    roles = {message.get("role") for message in messages}
    if task.metadata.get("system") and roles.isdisjoint(_SYSTEM_ROLES):
        return "has a field `system`, which is not sent: make it the first one of its `messages`"
    chat, body = ADAPTERS["chat"], {"messages": messages}
    if not HeldOutRows([task]).are_quoted(chat.question(body), chat.opening(body)):
        return (
            "has `messages` whose first and last user message do not contain its text, so requests "
            "of your app could not be recognised: let its text be that of the user's message"
        )
    return None


def _named(task: Task, file: Path, problem: str) -> str:
    return f"In {file}, the row {task.main_query[:60]!r} {problem}."


def _request_problem(task: Task) -> str | None:
    """Return the reason why the `messages` of a row are not valid in a request. Return None if they
    are valid, or if the row has no `messages`.
    """
    messages = task.metadata.get("messages")
    problem = None if messages is None else _message_problem(messages)
    if problem is None:
        return None
    return (
        f"has `messages` that {problem}: give it the messages of a request to "
        "/v1/chat/completions, or none"
    )


def _message_problem(messages: object) -> str | None:
    if not isinstance(messages, list):
        return "are not a list"
    if not messages:
        return "are empty"
    each = cast(list[object], messages)
    if not all(isinstance(message, dict) for message in each):
        return "are not a list of objects"
    if cast(Json, each[-1]).get("role") == "assistant":
        return "end with an answer"
    return None
