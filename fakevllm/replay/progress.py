"""The state file of a replay: one JSON line for each finished row, so that a replay can resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task


class Progress:
    """The finished rows of a replay, as the state file stores them. The constructor raises
    ConfigError if the file cannot be read or written, or is not the state file of a replay."""

    def __init__(self, file: Path, *, fresh: bool) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            content = b"" if fresh or not file.exists() else file.read_bytes()
            complete = content[: content.rfind(b"\n") + 1]
            self._done = set(_finished_rows(complete))
            self._file = file.open("ab", buffering=0)
            # A crash may leave half a line at the end; the next note must not be appended to it.
            self._file.truncate(len(complete))
        except OSError as error:
            raise ConfigError(
                f"The state file {file} cannot be used ({error.strerror}): set --state."
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{file} is not the state of a replay: set --state, or --fresh to overwrite it."
            ) from None

    @property
    def num_done(self) -> int:
        return len(self._done)

    def remaining(self, tasks: Sequence[Task], epochs: int) -> list[tuple[int, Task]]:
        """Return an (epoch, task) pair for each row that is not finished. The pairs are ordered by
        epoch. Within an epoch, they have the order of `tasks`."""
        rows = [(epoch, task) for epoch in range(epochs) for task in tasks]
        return [(epoch, task) for epoch, task in rows if (epoch, task.task_id) not in self._done]

    def note(self, epoch: int, task: Task, *, failed: str | None) -> None:
        """Record in the state file that a row of the replay is finished. `failed` is the reason why
        the row failed, or None if the row was answered."""
        self._done.add((epoch, task.task_id))
        line = {"epoch": epoch, "task_id": task.task_id} | ({"failed": failed} if failed else {})
        self._file.write(orjson.dumps(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def _finished_rows(lines: bytes) -> Iterator[tuple[int, str]]:
    for line in lines.splitlines():
        note = orjson.loads(line)
        yield note["epoch"], note["task_id"]
