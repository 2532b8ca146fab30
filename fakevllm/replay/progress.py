"""Which rows are done: one JSON line a row, so that an interrupted replay goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task


class Progress:
    """Raises ConfigError where the file cannot be used."""

    def __init__(self, file: Path, *, fresh: bool) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            known = b"" if fresh or not file.exists() else file.read_bytes()
            whole = known[: known.rfind(b"\n") + 1]
            self._done = set(_notes(whole))
            self._file = file.open("ab", buffering=0)
            # What follows the last newline is torn; the next note must not be glued to it.
            self._file.truncate(len(whole))
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
        """(epoch, task) still to be played, in order."""
        rows = [(epoch, task) for epoch in range(epochs) for task in tasks]
        return [(epoch, task) for epoch, task in rows if (epoch, task.task_id) not in self._done]

    def note(self, epoch: int, task: Task, *, failed: str | None) -> None:
        self._done.add((epoch, task.task_id))
        line = {"epoch": epoch, "task_id": task.task_id} | ({"failed": failed} if failed else {})
        self._file.write(orjson.dumps(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def _notes(lines: bytes) -> Iterator[tuple[int, str]]:
    for line in lines.splitlines():
        note = orjson.loads(line)
        yield note["epoch"], note["task_id"]
