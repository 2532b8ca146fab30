"""Where tasks come from. A reader can be gone through any number of times, and names its tasks the
same each time and on each machine, and no two of them alike: episodes of one task are compared with
each other."""

from __future__ import annotations

import csv
import hashlib
import io
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fakevllm.admission.task_index import read_tasks
from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task


class TaskReader(ABC):
    @abstractmethod
    def __iter__(self) -> Iterator[Task]: ...

    def generate_training_tasks(self) -> Iterator[Task]:
        """AgentJet's name for it."""
        return iter(self)


class JsonlReader(TaskReader):
    """A JSON object a line; `field` is what is asked, all of them are the task's metadata."""

    def __init__(self, path: str | Path, field: str = "question") -> None:
        """Raises ConfigError for a file that cannot be read or has no such field."""
        self._tasks = read_tasks(Path(path), field)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)


class CsvReader(TaskReader):
    """A file with a line of column names."""

    def __init__(self, path: str | Path, field: str = "question") -> None:
        """Raises ConfigError for a file that cannot be read or has no such column."""
        self._field = field
        try:
            raw = Path(path).read_bytes()
            text = io.StringIO(raw.decode("utf-8-sig"), newline="")  # as Excel writes it
            self._rows = _whole_rows(csv.DictReader(text))
        except (OSError, ValueError, csv.Error) as error:
            raise ConfigError(f"The dataset {path} cannot be read: {error}.") from None
        if self._rows and field not in self._rows[0]:
            names = ", ".join(map(str, self._rows[0]))[:300]
            raise ConfigError(f"{path} has no column {field!r}, but {names}: name another field.")
        self._name = _digest(raw)

    def __iter__(self) -> Iterator[Task]:
        for number, row in enumerate(self._rows):
            yield _task(f"{self._name}-{number}", row, self._field)


class HfReader(TaskReader):
    """A dataset of the Hugging Face `datasets` package: a name, or a folder on this machine."""

    def __init__(
        self, path: str, field: str = "question", split: str = "train", name: str | None = None
    ) -> None:
        """Raises ConfigError where the package is not installed, or there is no such dataset."""
        try:
            datasets: Any = import_module("datasets")
        except ImportError:
            raise ConfigError(
                "Datasets of Hugging Face need one more package: pip install datasets."
            ) from None
        self._field, self._prefix = field, f"{Path(path).name}-{split}"
        try:
            self._rows: Any = datasets.load_dataset(path, name, split=split)
        except (OSError, ValueError) as error:
            raise ConfigError(f"The dataset {path} cannot be loaded: {error}") from None
        if field not in self._rows.column_names:
            names = ", ".join(self._rows.column_names)[:300]
            raise ConfigError(f"{path} has no column {field!r}, but {names}: name another field.")

    def __iter__(self) -> Iterator[Task]:
        for number, row in enumerate(self._rows):
            # A dataset may lie elsewhere on another machine, and another one bear the same name.
            name = f"{self._prefix}-{number}-{_digest(str(row[self._field]).encode())}"
            yield _task(name, dict(row), self._field)


class RandomReader(TaskReader):
    """Tasks without contents, for agents that make up their own: a number each as the seed."""

    def __init__(self, num_tasks: int, seed: int = 0) -> None:
        self._num_tasks, self._seed = num_tasks, seed

    def __iter__(self) -> Iterator[Task]:
        drawn = random.Random(self._seed)
        for number in range(self._num_tasks):
            yield Task(
                task_id=f"random-{self._seed}-{number}", metadata={"seed": drawn.getrandbits(32)}
            )


class RouterReader(TaskReader):
    """Several readers as one. `env_type` says which one a task is from, and so does its id; each
    comes up in proportion to its share until it is at its end, spread evenly."""

    def __init__(
        self, readers: Mapping[str, TaskReader], shares: Mapping[str, float] | None = None
    ) -> None:
        """Without shares all have the same. Raises ValueError for shares of other names, or not
        above 0."""
        self._readers = dict(readers)
        self._shares = dict(shares) if shares is not None else dict.fromkeys(readers, 1.0)
        if self._shares.keys() != self._readers.keys() or min(self._shares.values()) <= 0:
            raise ValueError("shares must name the same readers, each above 0")

    def __iter__(self) -> Iterator[Task]:
        open_readers = {name: iter(reader) for name, reader in self._readers.items()}
        told = dict.fromkeys(open_readers, 0)
        while open_readers:
            name = min(open_readers, key=lambda one: (told[one] + 1) / self._shares[one])
            task = next(open_readers[name], None)
            if task is None:
                del open_readers[name]
                continue
            told[name] += 1
            yield task.model_copy(update={"env_type": name, "task_id": f"{name}-{task.task_id}"})


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:8]


def _whole_rows(reader: csv.DictReader[str]) -> list[dict[str, Any]]:
    """Raises ValueError."""
    rows: list[dict[str, Any]] = []
    for row in reader:
        cells: dict[Any, Any] = dict(row)
        if None in cells or None in cells.values():  # the reader's words for more and for fewer
            raise ValueError(f"line {reader.line_num} has not as many cells as there are columns")
        rows.append(cells)
    return rows


def _task(task_id: str, row: dict[str, Any], field: str) -> Task:
    return Task(task_id=task_id, main_query=str(row[field]), metadata=row)
