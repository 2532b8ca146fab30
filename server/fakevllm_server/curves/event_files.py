"""Writes TensorBoard event files, one file for each server process.

The file `cursor.json` in the same folder contains the cursor: the position in the journal up to
which the curves were written. The next process continues at the cursor. A step is written a second
time in two cases:

* The step is trained again.
* The previous process crashed after it had written the event file and before it wrote the cursor.

In each case, a START event is written before the step. The START event makes TensorBoard discard
the earlier values of this step and of all later steps.

From the package `tensorboard`, only the modules for messages and records are imported. These
modules load neither TensorFlow nor torch.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fakevllm_server.curves.points import REWARD_CHANGES, ChartItem, Cursor, Point, Restart
from fakevllm_server.curves.sample_tables import COMPLETIONS, as_markdown
from fakevllm_server.curves.tracker import TrackerMissing
from fakevllm_server.run.folder import write_atomically

FOLDER = "tensorboard"
"""Folder of the event files, in the run directory."""
FORMAT = "brain.Event:2"
"""File version in the first record of each event file. TensorBoard needs this version to obey START
events."""
DT_STRING, DATA_CLASS_TENSOR = 7, 2
"""Two numbers of TensorBoard's file format. DT_STRING is the data type of a text. DATA_CLASS_TENSOR
is the class of the curves whose values are texts."""


class EventFiles:
    """The event files of one run, which implement Tracker. A new file is opened at the first write.

    Only one process may write to the folder at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._messages: Any = None
        self._new_records: Any = None
        self._cursor_file = folder / "cursor.json"
        self._file: Any = None
        self._records: Any = None
        self._has_steps = False

    def cursor(self) -> Cursor:
        """Return the cursor in `cursor.json`: the position in the journal up to which the curves
        were written. If the file cannot be read, return the beginning of the journal."""
        try:
            return Cursor(**json.loads(self._cursor_file.read_bytes()))
        except (OSError, ValueError, TypeError):
            return Cursor()

    def load(self) -> None:
        """Import the package `tensorboard`. The import takes some tenths of a second.

        Raises TrackerMissing if the package is not installed.
        """
        try:
            self._messages = importlib.import_module("tensorboard.compat.proto.event_pb2")
            records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            raise TrackerMissing(
                f"The package `tensorboard` cannot be imported ({error}): run `pip install "
                "tensorboard` (or install the extra `tensorboard`), then `fakevllm-server curves` "
                "to write the curves."
            ) from None
        self._new_records = records.RecordWriter

    def write(self, items: Sequence[ChartItem], cursor: Cursor) -> None:
        """Write `items` (points of curves, and rollbacks of the run) to the event file. Then write
        `cursor` to `cursor.json`.

        Raises TrackerMissing if the package `tensorboard` is missing. Raises OSError if the disk
        fails. After an OSError, the next call writes to a new file.
        """
        if items and self._messages is None:
            self.load()
        try:
            for item in items:
                self._put(item)
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError:
            self.close()
            raise
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._cursor_file, json.dumps(asdict(cursor)))

    def clear(self) -> None:
        """Delete all TensorBoard event files of the run, and the file `cursor.json`."""
        self.close()
        for file in [self._cursor_file, *self._folder.glob("events.out.tfevents.*")]:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the event file.

        After a failed call of `write`, the file may lack some of the points that the call was to
        write. The cursor in `cursor.json` is then still before these points. Therefore the next
        call of `write` gets these points again.
        """
        file, self._file, self._records = self._file, None, None
        self._has_steps = False
        if file is not None:
            file.close()

    def _put(self, item: ChartItem) -> None:
        """Write one item to the event file: a point of a curve, or a START event for a rollback of
        the run."""
        if isinstance(item, Restart):
            return self._put_start(item.step, item.at)
        is_of_step = "training/global_step" in item.values or REWARD_CHANGES in item.texts
        if not self._has_steps and is_of_step:
            # The previous process may have written this step and died before it wrote the cursor.
            self._put_start(item.step, item.at)
        self._put_point(item)

    def _put_start(self, step: int, at: float) -> None:
        """Write a START event. It makes TensorBoard discard the earlier values of `step` and of all
        later steps."""
        self._has_steps = True
        start = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write(self._messages.Event(wall_time=at, step=step, session_log=start))

    def _put_point(self, point: Point) -> None:
        event = self._messages.Event(wall_time=point.at, step=point.step)
        for name, value in point.values.items():
            event.summary.value.add(tag=name, simple_value=value)
        for name, text in point.texts.items():
            self._add_text(event, name, text)
        if point.table is not None:
            self._add_text(event, COMPLETIONS, as_markdown(point.table))
        self._write(event)

    def _add_text(self, event: Any, name: str, text: str) -> None:
        """Add a text to an event, in the form that TensorBoard's text plugin reads."""
        value = event.summary.value.add(tag=name)
        value.metadata.plugin_data.plugin_name = "text"
        value.metadata.data_class = DATA_CLASS_TENSOR
        value.tensor.dtype = DT_STRING
        value.tensor.string_val.append(text.encode())

    def _write(self, event: Any) -> None:
        """Append an event to the open event file. If no file is open, create a new file first."""
        if self._records is None:
            self._file = _next_file(self._folder).open("xb")
            self._records = self._new_records(self._file)
            self._write(self._messages.Event(wall_time=event.wall_time, file_version=FORMAT))
        self._records.write(event.SerializeToString())


def _next_file(folder: Path) -> Path:
    """Return the path of a new event file.

    TensorBoard reads files in the order of their names. Therefore the new name sorts after the
    existing names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [file.suffix[1:] for file in folder.glob("events.out.tfevents.*")]
    number = 1 + max((int(name) for name in names if name.isdecimal()), default=0)
    return folder / f"events.out.tfevents.{number:08}"
