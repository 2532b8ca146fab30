"""Which task a request belongs to: by its key, or by quoting exactly one row of a dataset. Pure."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.keys import task_id_of, task_key
from fakevllm_adapters.protocol.swarm import Task

_SPACE = re.compile(r"\s+")
_PREFIX = 16
"""Characters by which rows are found in a text; a dataset has few rows that begin alike."""
_NUM_MAC_DIGITS = 16


class TaskIndex:
    """Tasks by id, and optionally by their text. With a secret, task keys are signed by it."""

    def __init__(
        self, secret: bytes | None = None, accepts_unsigned: Callable[[], bool] | None = None
    ) -> None:
        """`secret`: key that signs task keys; None: they are not signed. `accepts_unsigned`: called
        for each look-up; whether a task key without a signature is accepted as well. By default it
        is accepted only if there is no secret."""
        self._secret = secret
        self._accepts_unsigned = accepts_unsigned or (lambda: secret is None)
        self._tasks: dict[str, Task] = {}
        self._by_text: defaultdict[str, list[Task]] = defaultdict(list)
        self._texts = TextIndex()
        self.counts: Counter[str] = Counter()
        """Text look-ups: hit, miss, tie."""

    def add(self, tasks: Iterable[Task], *, by_text: bool = False) -> None:
        for task in tasks:
            self._tasks[task.task_id] = task
            if by_text and (text := normalised(task.main_query)):
                self._by_text[text].append(task)
                self._texts.add(text)

    def key(self, task_id: str) -> str:
        """The API key that names this task."""
        if self._secret is None:
            return task_key(task_id)
        return f"{task_key(task_id)}.{self._mac(self._secret, task_id)}"

    def knows(self, key: str | None) -> bool:
        """Whether `key` names a registered task."""
        return self._by_key(key) is not None

    def find(self, key: str | None, opening: str) -> Task | None:
        """The task of a `sk-task-…` key, else the one row the first user message contains."""
        if task_id_of(key) is not None:
            return self._by_key(key)
        return self._by_opening(opening) if self._by_text else None

    def by_id(self, task_id: str | None) -> Task | None:
        return self._tasks.get(task_id or "")

    def _by_key(self, key: str | None) -> Task | None:
        task_id = task_id_of(key)
        if task_id is None:
            return None
        if self._secret is not None:
            signed, _, mac = task_id.rpartition(".")
            if hmac.compare_digest(mac.encode(), self._mac(self._secret, signed).encode()):
                return self._tasks.get(signed)
        return self._tasks.get(task_id) if self._accepts_unsigned() else None

    @staticmethod
    def _mac(secret: bytes, task_id: str) -> str:
        return hmac.new(secret, task_id.encode(), "sha256").hexdigest()[:_NUM_MAC_DIGITS]

    def _by_opening(self, opening: str) -> Task | None:
        text = normalised(opening)
        rows = self._by_text.get(text) or self._contained(text)
        outcome = "miss" if not rows else "hit" if len(rows) == 1 else "tie"
        self.counts[outcome] += 1
        return rows[0] if outcome == "hit" else None

    def _contained(self, text: str) -> list[Task]:
        """Rows inside `text`. A row that is part of another row found says nothing of its own."""
        found = self._texts.inside(text)
        longest = [
            row for row in found if not any(row != other and row in other for other in found)
        ]
        return [task for row in longest for task in self._by_text[row]]


class TextIndex:
    """Finds which of many rows a text contains, in one pass over the text.

    >>> index = TextIndex()
    >>> index.add("what is 1 plus 2?")
    >>> index.inside("so, what is 1 plus 2? thanks")
    {'what is 1 plus 2?'}
    """

    def __init__(self) -> None:
        self._short: set[str] = set()
        self._long: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )
        """By their first characters, then by length: rows that begin alike cost one look-up."""

    def add(self, row: str) -> None:
        if len(row) < _PREFIX:
            self._short.add(row)
        else:
            self._long[row[:_PREFIX]][len(row)].add(row)

    def inside(self, text: str) -> set[str]:
        found = {row for row in self._short if row in text}
        for at in range(len(text) - _PREFIX + 1):
            alike = self._long.get(text[at : at + _PREFIX])
            for length, rows in alike.items() if alike is not None else ():
                if (part := text[at : at + length]) in rows:
                    found.add(part)
        return found


def normalised(text: str) -> str:
    """
    >>> normalised("  What is\\n1 plus 2? ")
    'what is 1 plus 2?'
    """
    return _SPACE.sub(" ", text).strip().lower()


def endless_rows(tasks: Sequence[Task], seed: int, skip: int = 0) -> Iterator[tuple[int, Task]]:
    """(round, task), the tasks shuffled anew in each round; `skip` rows were played before."""
    round_, played = 0, 0
    while True:
        order = list(tasks)
        random.Random(f"{seed} {round_}").shuffle(order)
        for task in order:
            if played >= skip:
                yield round_, task
            played += 1
        round_ += 1


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
        record: Any = _strict_json(line)
    except (ValueError, RecursionError) as error:
        said = f" ({error})" if type(error) is ValueError else ""
        raise ConfigError(
            f"{file}, line {row + 1}, is not JSON{said}: the dataset must be JSON Lines."
        ) from None
    fields = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    text = fields.get(field)
    if not isinstance(text, str):
        raise ConfigError(
            f"{file}, line {row + 1}, has no text field {field!r} "
            f"(its fields: {', '.join(fields)[:300]}): set --field, or `field`."
        )
    return Task(task_id=task_id, main_query=text, metadata=fields)


def _strict_json(line: bytes) -> Any:
    """What could not be sent on is refused here. Raises ValueError, RecursionError."""

    def refuse(name: str) -> float:
        raise ValueError(f"it holds {name}")

    record: Any = json.loads(line, parse_constant=refuse)
    try:
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair") from None
    except ValueError:
        raise ValueError("it holds a number too large") from None
    return record
