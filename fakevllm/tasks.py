"""Which task a request belongs to: by its key, or by quoting exactly one row of a dataset. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from fakevllm.errors import ConfigError
from fakevllm_adapters.keys import task_id_of
from fakevllm_adapters.swarm import Task

_SPACE = re.compile(r"\s+")


class TaskIndex:
    """Tasks by id, and optionally by their text."""

    def __init__(self) -> None:
        self._by_id: dict[str, Task] = {}
        self._by_text: defaultdict[str, list[Task]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        """Text look-ups: hit, miss, tie."""

    def add(self, tasks: Iterable[Task], *, by_text: bool = False) -> None:
        for task in tasks:
            self._by_id[task.task_id] = task
            if by_text and (text := normalised(task.main_query)):
                self._by_text[text].append(task)

    def find(self, key: str | None, opening: str) -> Task | None:
        """The task of a `sk-task-…` key, else the one row the first user message contains."""
        task_id = task_id_of(key)
        if task_id is not None:
            return self._by_id.get(task_id)
        return self._by_opening(opening) if self._by_text else None

    def _by_opening(self, opening: str) -> Task | None:
        text = normalised(opening)
        rows = self._by_text.get(text) or self._contained(text)
        outcome = "miss" if not rows else "hit" if len(rows) == 1 else "tie"
        self.counts[outcome] += 1
        return rows[0] if outcome == "hit" else None

    def _contained(self, text: str) -> list[Task]:
        """Rows inside `text`. A row that is part of another row found says nothing of its own."""
        found = [row for row in self._by_text if row in text]
        longest = [
            row for row in found if not any(row != other and row in other for other in found)
        ]
        return [task for row in longest for task in self._by_text[row]]


def normalised(text: str) -> str:
    """
    >>> normalised("  What is\\n1 plus 2? ")
    'what is 1 plus 2?'
    """
    return _SPACE.sub(" ", text).strip().lower()


def read_tasks(file: Path, field: str) -> list[Task]:
    """One task per JSONL row; its id names the file's content and the row. Raises ConfigError."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"The dataset {file} cannot be read: {error.strerror}.") from None
    name = hashlib.sha256(raw).hexdigest()[:8]
    lines = raw.splitlines()
    return [
        _task(f"{name}-{row}", line, row, file, field)
        for row, line in enumerate(lines)
        if line.strip()
    ]


def _task(task_id: str, line: bytes, row: int, file: Path, field: str) -> Task:
    try:
        record: Any = json.loads(line)
    except ValueError:
        raise ConfigError(
            f"{file}, line {row + 1}, is not JSON: the dataset must be JSON Lines."
        ) from None
    fields = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    text = fields.get(field)
    if not isinstance(text, str):
        raise ConfigError(
            f"{file}, line {row + 1}, has no text field {field!r} "
            f"(its fields: {', '.join(fields)}): set --field."
        )
    return Task(task_id=task_id, main_query=text, metadata=fields)
