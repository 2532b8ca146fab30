"""Read the files that wandb writes offline, with wandb's own messages.

wandb's reader of these files is a part of its compiled program. A file has a header of 7 bytes, and
then records in LevelDB's log format: blocks of 32 KiB with parts of records. Each part has a header
of 7 bytes, with checksum, length and kind.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="the package wandb is not installed: pip install -e '.[wandb]'",
)
HEADER_BYTES = 7
BLOCK_BYTES = 32_768
FULL, FIRST, LAST = 1, 2, 4


class WandbRows:
    """The rows of all files of a run of wandb, in the order in which they were written."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir
        self.files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
        self.rows: list[dict[str, Any]] = []
        self.kinds: set[str] = set()
        """Kinds of all records."""
        self.x_axis: dict[str, str] = {}
        """Name of the curve on the x-axis, by the pattern of the curves' names."""
        self.raw = b"".join(file.read_bytes() for file in self.files)
        messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
        for file in self.files:
            for data in _records(file.read_bytes()):
                record = messages.Record()
                record.ParseFromString(data)
                self._add(record)

    def _add(self, record: Any) -> None:
        self.kinds.add(record.WhichOneof("record_type"))
        if record.HasField("history"):
            items = record.history.item
            row: dict[str, Any] = {"_step": record.history.step.num}
            for item in items:
                *outer, name = [item.key] if item.key else item.nested_key
                place = row
                for key in outer:
                    place = place.setdefault(key, {})
                place[name] = json.loads(item.value_json)
            self.rows.append(row)
        if record.HasField("metric") and record.metric.step_metric:
            metric = record.metric
            self.x_axis[metric.glob_name or metric.name] = metric.step_metric

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Return (step, value) of each point of each curve."""
        curves: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in self.rows:
            for name, value in row.items():
                if not name.startswith("_") and isinstance(value, int | float):
                    curves[name].append((row["training/global_step"], value))
        return dict(curves)

    def tables(self, name: str) -> list[tuple[int, list[list[Any]]]]:
        """Return (step, rows) of each table with a name. The first row has the columns."""
        found: list[tuple[int, list[list[Any]]]] = []
        for row in self.rows:
            if name in row:
                assert row[name]["_type"] == "table-file"
                (file,) = {*self._folder.glob(f"wandb/offline-run-*/files/{row[name]['path']}")}
                table = json.loads(file.read_bytes())
                found.append((row["training/global_step"], [table["columns"], *table["data"]]))
        return found

    def texts(self, name: str) -> list[tuple[int, str]]:
        return [(row["training/global_step"], row[name]) for row in self.rows if name in row]


def _records(data: bytes) -> Iterator[bytes]:
    record, at = b"", HEADER_BYTES
    while at + HEADER_BYTES <= len(data):
        if at % BLOCK_BYTES > BLOCK_BYTES - HEADER_BYTES:  # the rest of the block is empty
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        record = part if kind in (FULL, FIRST) else record + part
        if kind in (FULL, LAST):
            yield record
        at += HEADER_BYTES + length


def is_same(one: float, other: float) -> bool:
    """Return whether two values are equal, of which one may have been stored as a float32."""
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9) or (
        math.isnan(one) and math.isnan(other)
    )
