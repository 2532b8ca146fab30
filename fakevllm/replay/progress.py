"""Which rows are done: one JSON line a row, so that an interrupted replay goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from fakevllm_adapters.swarm import Task


class Progress:
    def __init__(self, file: Path, *, fresh: bool) -> None:
        self._done: set[tuple[int, str]] = set() if fresh else set(_read(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("wb" if fresh else "ab", buffering=0)

    @property
    def num_done(self) -> int:
        return len(self._done)

    def remaining(self, tasks: Sequence[Task], epochs: int) -> list[tuple[int, Task]]:
        """(epoch, task) still to be played, in order."""
        rows = [(epoch, task) for epoch in range(epochs) for task in tasks]
        return [(epoch, task) for epoch, task in rows if (epoch, task.task_id) not in self._done]

    def note(self, epoch: int, task: Task, *, failed: str | None) -> None:
        self._done.add((epoch, task.task_id))
        line = {"epoch": epoch, "task_id": task.task_id} | ({"failed": failed} if failed else {})
        self._file.write(orjson.dumps(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def _read(file: Path) -> Iterator[tuple[int, str]]:
    if not file.exists():
        return
    for line in file.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is torn
        note = orjson.loads(line)
        yield note["epoch"], note["task_id"]
