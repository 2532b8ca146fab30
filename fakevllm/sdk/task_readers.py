"""Readers of tasks from files and datasets. Each reader is an iterable of tasks.

A reader can be iterated any number of times. Task ids are unique within a reader. They must be
unique, because the server compares the rewards of episodes with the same task id. A task has the
same id in each iteration and on each machine.
"""

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

from fakevllm.admission.dataset import read_tasks
from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task


class TaskReader(ABC):
    """An iterable of tasks, such as questions from a file, on which agents are trained."""

    @abstractmethod
    def __iter__(self) -> Iterator[Task]: ...

    def generate_training_tasks(self) -> Iterator[Task]:
        """Return an iterator over the tasks. This is AgentJet's name for `iter(reader)`."""
        return iter(self)


class JsonlReader(TaskReader):
    """Tasks from a JSON Lines file. The value of the key `field` becomes the task's query, and the
    whole JSON object becomes the task's metadata."""

    def __init__(self, path: str | Path, field: str = "question") -> None:
        """Read the file. Raises ConfigError if the file cannot be read, or if a row does not have
        the key `field`."""
        self._tasks = read_tasks(Path(path), field)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)


class CsvReader(TaskReader):
    """Tasks from a CSV file whose first line has the column names."""

    def __init__(self, path: str | Path, field: str = "question") -> None:
        """Read the file. Raises ConfigError if the file cannot be read or has no column `field`."""
        self._field = field
        try:
            raw = Path(path).read_bytes()
            text = io.StringIO(raw.decode("utf-8-sig"), newline="")  # Excel writes a BOM
            self._rows = _complete_rows(csv.DictReader(text))
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
    """Tasks from a dataset of the Hugging Face `datasets` package. `path` is a name on the Hugging
    Face Hub, or a folder."""

    def __init__(
        self, path: str, field: str = "question", split: str = "train", name: str | None = None
    ) -> None:
        """Load the dataset.

        Raises ConfigError if the package `datasets` is not installed. Raises ConfigError as well if
        the dataset cannot be loaded or has no column `field`.
        """
        try:
            datasets: Any = import_module("datasets")
        except ImportError:
            raise ConfigError(
                "HfReader needs the package `datasets`: pip install datasets."
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
            # The id contains no path, which differs between machines, but a digest of the row,
            # because another dataset may have the same name.
            name = f"{self._prefix}-{number}-{_digest(str(row[self._field]).encode())}"
            yield _task(name, dict(row), self._field)


class RandomReader(TaskReader):
    """Tasks that contain only a random seed, as metadata. Agents that generate their own problems
    use these tasks."""

    def __init__(self, num_tasks: int, seed: int = 0) -> None:
        self._num_tasks, self._seed = num_tasks, seed

    def __iter__(self) -> Iterator[Task]:
        seeds = random.Random(self._seed)
        for number in range(self._num_tasks):
            yield Task(
                task_id=f"random-{self._seed}-{number}", metadata={"seed": seeds.getrandbits(32)}
            )


class RouterReader(TaskReader):
    """A reader that combines several readers.

    The tasks of the readers alternate. Each reader has a share: a reader whose share is twice as
    large contributes twice as many tasks. When one reader has no more tasks, the others continue.
    The name of a task's reader becomes the task's `env_type`, and is put in front of the task's id.
    """

    def __init__(
        self, readers: Mapping[str, TaskReader], shares: Mapping[str, float] | None = None
    ) -> None:
        """Combine the readers. `shares` maps each reader's name to its share. If `shares` is None,
        all shares are equal.

        Raises ValueError if `shares` and `readers` have different names, or if a share is not
        positive.
        """
        self._readers = dict(readers)
        self._shares = dict(shares) if shares is not None else dict.fromkeys(readers, 1.0)
        if self._shares.keys() != self._readers.keys() or min(self._shares.values()) <= 0:
            raise ValueError("shares must name the same readers, each above 0")

    def __iter__(self) -> Iterator[Task]:
        open_readers = {name: iter(reader) for name, reader in self._readers.items()}
        num_tasks = dict.fromkeys(open_readers, 0)
        while open_readers:
            name = min(
                open_readers, key=lambda reader: (num_tasks[reader] + 1) / self._shares[reader]
            )
            task = next(open_readers[name], None)
            if task is None:
                del open_readers[name]
                continue
            num_tasks[name] += 1
            yield task.model_copy(update={"env_type": name, "task_id": f"{name}-{task.task_id}"})


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:8]


def _complete_rows(reader: csv.DictReader[str]) -> list[dict[str, Any]]:
    """Return all rows of a CSV file. Raises ValueError for a row with too many or too few cells."""
    rows: list[dict[str, Any]] = []
    for row in reader:
        cells: dict[Any, Any] = dict(row)
        if None in cells or None in cells.values():  # csv's marks for extra and missing cells
            raise ValueError(
                f"line {reader.line_num} has more or fewer cells than there are columns"
            )
        rows.append(cells)
    return rows


def _task(task_id: str, row: dict[str, Any], field: str) -> Task:
    return Task(task_id=task_id, main_query=str(row[field]), metadata=row)
