"""Read tasks from a dataset file in JSON Lines, and yield them in shuffled order. Each row of the
file is a task."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task

_MAX_SHOWN_CHARS = 300
"""Maximum length, in characters, of the list of field names in an error message."""
_INDEX = re.compile("[0-9]{1,12}")


class DatasetRow(NamedTuple):
    """One row of a dataset in JSON Lines."""

    row_id: str
    """Id of the row. The id contains a hash of the file's content, and the row's index."""
    line_number: int
    """Number of the row's line in the file. The first line is 1."""
    fields: dict[str, Any]
    """The row's JSON object. The dict is empty if the row is a JSON value of another type."""

    @property
    def field_names(self) -> str:
        """The names of the row's fields, for an error message."""
        return ", ".join(self.fields)[:_MAX_SHOWN_CHARS]


def endless_rows(tasks: Sequence[Task], seed: int, skip: int = 0) -> Iterator[tuple[int, Task]]:
    """Yield pairs (round number, task) forever. Each round yields all tasks once, in a new order.
    The first round has the number 0.

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
    """Return one task per row of the dataset file. `field` is the name of the field that contains
    the task's query. The task's metadata is the whole row.

    A task's id contains a hash of the file's content, and the row's index. Raises ConfigError if
    the file cannot be read or a row is not valid.
    """
    return [_task(row, file, field) for row in read_rows(file)]


def tasks_by_id(file: Path | None, field: str) -> dict[str, Task]:
    """Return a dict from the id of each task in the dataset file to the task. If `file` is None,
    return an empty dict.

    Raises ConfigError if the file cannot be read or a row is not valid.
    """
    tasks = [] if file is None else read_tasks(file, field)
    return {task.task_id: task for task in tasks}


def find_row(file: Path, row_id: str) -> dict[str, Any] | None:
    """Return the fields of the row with this id. Return None if the file does not have the row,
    for example because the file has changed since.

    Raises ConfigError if the file cannot be read or the row is not JSON.
    """
    file_hash, _, index = row_id.rpartition("-")
    if not _INDEX.fullmatch(index):
        return None
    raw = _read(file)
    if _hash(raw) != file_hash:
        return None
    lines = raw.splitlines()
    number = int(index)
    return _fields(lines[number], number + 1, file) if number < len(lines) else None


def read_rows(file: Path) -> list[DatasetRow]:
    """Return the rows of a JSON Lines file. Blank lines are left out.

    Raises ConfigError if the file cannot be read or a line is not JSON.
    """
    raw = _read(file)
    file_hash = _hash(raw)
    lines = raw.splitlines()
    return [
        DatasetRow(f"{file_hash}-{index}", index + 1, _fields(line, index + 1, file))
        for index, line in enumerate(lines)
        if line.strip()
    ]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"The dataset {file} cannot be read: {error.strerror}.") from None


def _hash(raw: bytes) -> str:
    """Return the hash of a file's content that is part of the ids of its rows."""
    return hashlib.sha256(raw).hexdigest()[:8]


def _task(row: DatasetRow, file: Path, field: str) -> Task:
    text = row.fields.get(field)
    if not isinstance(text, str):
        raise ConfigError(
            f"{file}, line {row.line_number}, has no text field {field!r} "
            f"(its fields: {row.field_names}): set --field, or the key `field` (`[dataset]` in "
            "fakevllm.toml)."
        )
    return Task(task_id=row.row_id, main_query=text, metadata=row.fields)


def _fields(line: bytes, line_number: int, file: Path) -> dict[str, Any]:
    try:
        record: Any = _strict_json(line)
    except (ValueError, RecursionError) as error:
        cause = f" ({error})" if type(error) is ValueError else ""
        raise ConfigError(
            f"{file}, line {line_number}, is not JSON{cause}: the dataset must be JSON Lines."
        ) from None
    return cast(dict[str, Any], record) if isinstance(record, dict) else {}


def _strict_json(line: bytes) -> Any:
    """Return the parsed value of a line. Raises ValueError or RecursionError if the line is not
    JSON. Raises ValueError as well for a value that cannot be sent to the server in strict JSON,
    such as NaN."""

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
