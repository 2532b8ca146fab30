"""Event files for TensorBoard, in a folder of their own: one file for each life that writes.

`cursor.json` beside them tells what has been written, so that the next life goes on there. Where it
is behind, for a crash came between the two, or where steps are trained again, a mark in the file
lets TensorBoard forget what it has read from that step on.

Of the package `tensorboard` only messages and records are imported, which load neither TensorFlow
nor torch.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fakevllm_server.config.model import ConfigError
from fakevllm_server.curves.points import ChartItem, Cursor, Point, Restart
from fakevllm_server.run.folder import write_atomically

FORMAT = "brain.Event:2"
"""In the first record of each file. Readers heed marks since this version."""


class PackageMissing(ConfigError):
    """Nothing can be written here."""


class EventFiles:
    """Opens a file when it has something to write. Not for two at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._messages: Any = None
        self._new_records: Any = None
        self._cursor_file = folder / "cursor.json"
        self._file: Any = None
        self._records: Any = None
        self._has_steps = False

    def cursor(self) -> Cursor:
        """The beginning, where none is known."""
        try:
            return Cursor(**json.loads(self._cursor_file.read_bytes()))
        except (OSError, ValueError, TypeError):
            return Cursor()

    def load(self) -> None:
        """The package, which takes some tenths of a second. Raises PackageMissing."""
        try:
            self._messages = importlib.import_module("tensorboard.compat.proto.event_pb2")
            records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            raise PackageMissing(
                f"the package `tensorboard` cannot be loaded ({error}): pip install tensorboard, "
                "then `fakevllm-server curves` writes what is missing."
            ) from None
        self._new_records = records.RecordWriter

    def write(self, charted: Sequence[ChartItem], cursor: Cursor) -> None:
        """All of it, then the cursor. Raises PackageMissing, and OSError: then the next try writes
        to a new file."""
        if charted and self._messages is None:
            self.load()
        try:
            for one in charted:
                self._put(one)
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError:
            self.close()
            raise
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._cursor_file, json.dumps(asdict(cursor)))

    def clear(self) -> None:
        """Forgets all that was written before."""
        self.close()
        for file in [self._cursor_file, *self._folder.glob("events.out.tfevents.*")]:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """What is not on disk by now is written again by the next, for the cursor is behind it."""
        file, self._file, self._records = self._file, None, None
        self._has_steps = False
        if file is not None:
            file.close()

    def _put(self, one: ChartItem) -> None:
        if isinstance(one, Restart):
            return self._mark(one.step, one.at)
        if not self._has_steps and "training/global_step" in one.values:
            # A life before this one may have written it, and died before it moved the cursor.
            self._mark(one.step, one.at)
        self._record(one)

    def _mark(self, step: int, at: float) -> None:
        self._has_steps = True
        start = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write(self._messages.Event(wall_time=at, step=step, session_log=start))

    def _record(self, point: Point) -> None:
        event = self._messages.Event(wall_time=point.at, step=point.step)
        for name, value in point.values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def _write(self, event: Any) -> None:
        if self._records is None:
            self._file = _next_file(self._folder).open("xb")
            self._records = self._new_records(self._file)
            self._write(self._messages.Event(wall_time=event.wall_time, file_version=FORMAT))
        self._records.write(event.SerializeToString())


def _next_file(folder: Path) -> Path:
    """Readers take files in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [file.suffix[1:] for file in folder.glob("events.out.tfevents.*")]
    number = 1 + max((int(name) for name in names if name.isdecimal()), default=0)
    return folder / f"events.out.tfevents.{number:08}"
