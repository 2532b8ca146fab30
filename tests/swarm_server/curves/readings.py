"""Read event files with TensorBoard's own reader."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fakevllm_server.curves.event_files import FOLDER

READER = "tensorboard.backend.event_processing.event_accumulator"


class Charts:
    def __init__(self, run_dir: Path) -> None:
        reader: Any = importlib.import_module(READER)  # the module has no type annotations
        self._read = reader.EventAccumulator(str(run_dir / FOLDER), {reader.SCALARS: 0})
        self._read.Reload()

    @property
    def names(self) -> set[str]:
        return set(self._read.Tags()["scalars"])

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of each point of a curve, in the order in which they were read."""
        return [(point.step, point.value) for point in self._read.Scalars(name)]

    def all_points(self) -> dict[str, list[tuple[int, float]]]:
        return {name: self.points(name) for name in self.names}

    def steps(self, name: str = "training/global_step") -> list[int]:
        return [step for step, _ in self.points(name)]

    def times(self, name: str) -> list[float]:
        return [point.wall_time for point in self._read.Scalars(name)]
