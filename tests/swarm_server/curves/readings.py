"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fakevllm_server.curves.follower import FOLDER

READER = "tensorboard.backend.event_processing.event_accumulator"


class Charts:
    def __init__(self, run_dir: Path) -> None:
        reader: Any = importlib.import_module(READER)  # it has no types
        self._read = reader.EventAccumulator(str(run_dir / FOLDER), {reader.SCALARS: 0})
        self._read.Reload()

    @property
    def names(self) -> set[str]:
        return set(self._read.Tags()["scalars"])

    def of(self, name: str) -> list[tuple[int, float]]:
        """Step and value, in the order they were read."""
        return [(point.step, point.value) for point in self._read.Scalars(name)]

    def steps(self, name: str = "training/global_step") -> list[int]:
        return [step for step, _ in self.of(name)]

    def times(self, name: str) -> list[float]:
        return [point.wall_time for point in self._read.Scalars(name)]
