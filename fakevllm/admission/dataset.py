"""Read tasks from a dataset in JSON Lines, and yield them in shuffled order."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task

_MAX_SHOWN_CHARS = 300
"""Maximum number of characters of field names in an error message."""


def endless_rows(tasks: Sequence[Task], seed: int, skip: int = 0) -> Iterator[tuple[int, Task]]:
    """Yield (number of the round, task) without end. Each round has all tasks in a new order;
    rounds are numbered from 0.

    `skip`: number of tasks to leave out at the beginning, because an earlier run has used them.
    """
    round_, num_rows = 0, 0
    while True:
        order = list(tasks)
        random.Random(f"{seed} {round_}").shuffle(order)
        for task in order:
            if num_rows >= skip:
                yield round_, task
            num_rows += 1
        round_ += 1


def read_tasks(file: Path, field: str) -> list[Task]:
    """Return one task per row of the dataset file. The task's query is the text in the row's field
    `field`, and its metadata is the whole row.

    A task's id consists of a hash of the file's content and the row's index. Raises ConfigError if
    the file cannot be read or a row is not valid.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"The dataset {file} cannot be read: {error.strerror}.") from None
    file_hash = hashlib.sha256(raw).hexdigest()[:8]
    lines = raw.splitlines()
    return [
        _task(f"{file_hash}-{row}", line, row, file, field)
        for row, line in enumerate(lines)
        if line.strip()
    ]


def _task(task_id: str, line: bytes, row: int, file: Path, field: str) -> Task:
    try:
        record: Any = _strict_json(line)
    except (ValueError, RecursionError) as error:
        cause = f" ({error})" if type(error) is ValueError else ""
        raise ConfigError(
            f"{file}, line {row + 1}, is not JSON{cause}: the dataset must be JSON Lines."
        ) from None
    fields = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    text = fields.get(field)
    if not isinstance(text, str):
        names = ", ".join(fields)[:_MAX_SHOWN_CHARS]
        raise ConfigError(
            f"{file}, line {row + 1}, has no text field {field!r} "
            f"(its fields: {names}): set --field, or `field`."
        )
    return Task(task_id=task_id, main_query=text, metadata=fields)


def _strict_json(line: bytes) -> Any:
    """Return the parsed value of a line. Raises ValueError or RecursionError if the line is not
    JSON, or if its value cannot be sent to the server as JSON."""

    def refuse(name: str) -> float:
        raise ValueError(f"it contains {name}")

    record: Any = json.loads(line, parse_constant=refuse)
    try:
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it contains half a surrogate pair") from None
    except ValueError:
        raise ValueError("it contains a number that is too large") from None
    return record
