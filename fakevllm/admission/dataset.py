"""Read tasks from a dataset file in JSON Lines, and yield them in shuffled order. Each row of the
file is a task."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task

_MAX_SHOWN_CHARS = 300
"""Maximum length, in characters, of the list of field names in an error message."""
_INDEX = re.compile("[0-9]{1,12}")
_HASH_CHARS = 8


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


class _LineIndex(NamedTuple):
    """The places of the lines of a file."""

    state: tuple[int, int, int]
    """Inode, modification time and size of the file for which the index was made."""
    file_hash: str
    offsets: Sequence[int]
    """The offset of each line, and the size of the file at the end."""


class IndexedDataset:
    """A dataset file in which rows are found by id. The file is read as a whole only if it has
    changed. Threads may share the object."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        """A file of more than `max_bytes` is not read, and none of its rows is found."""
        self._file = file
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._index: _LineIndex | None = None

    def find_row(self, row_id: str) -> dict[str, Any] | None:
        """Return the fields of the row with this id. Return None if the file does not have the row,
        for example because the file has changed since.

        Raises ConfigError if the file cannot be read or the row is not JSON.
        """
        file_hash, _, number_text = row_id.rpartition("-")
        if not _INDEX.fullmatch(number_text):
            return None
        number = int(number_text)
        try:
            with self._file.open("rb") as raw:
                index = self._current_index(raw)
                if index is None or index.file_hash != file_hash:
                    return None
                if number + 1 >= len(index.offsets):
                    return None
                raw.seek(index.offsets[number])
                line = raw.read(index.offsets[number + 1] - index.offsets[number])
        except OSError as error:
            raise _unreadable(self._file, error) from None
        return _fields(line, number + 1, self._file)

    def _current_index(self, raw: BinaryIO) -> _LineIndex | None:
        """Return the index of the open file. Return None if the file is too large."""
        facts = os.fstat(raw.fileno())
        if facts.st_size > self._max_bytes:
            return None
        state = facts.st_ino, facts.st_mtime_ns, facts.st_size
        with self._lock:
            if self._index is None or self._index.state != state:
                self._index = _LineIndex(state, *_hash_and_offsets(raw))
            return self._index


def _hash_and_offsets(raw: BinaryIO) -> tuple[str, Sequence[int]]:
    """Return the hash of a file, and the offsets of the lines into which `bytes.splitlines` splits
    its content, with the size at the end."""
    digest, offsets = hashlib.sha256(), array("Q", [0])
    for ended_by_newline in raw:
        digest.update(ended_by_newline)
        for line in ended_by_newline.splitlines(keepends=True):
            offsets.append(offsets[-1] + len(line))
    return digest.hexdigest()[:_HASH_CHARS], offsets


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
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"The dataset {file} cannot be read: {error.strerror}.")


def _hash(raw: bytes) -> str:
    """Return the hash of a file's content that is part of the ids of its rows."""
    return hashlib.sha256(raw).hexdigest()[:_HASH_CHARS]


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
