"""Read event files with TensorBoard's own reader."""

from __future__ import annotations

import importlib
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fakevllm_server.curves.event_files import FOLDER

READER = "tensorboard.backend.event_processing.event_accumulator"


class _Cells(HTMLParser):
    """Reads the cells of a table. Any other element than a line break is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "br":
            self.rows[-1][-1] += "\n"
        else:
            assert tag in ("table", "thead", "tbody"), f"{tag} in a table"

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def shown_cells(html: str) -> list[list[str]]:
    """Return the texts of a table's cells, by row."""
    reader = _Cells()
    reader.feed(html)
    return [[cell.strip() for cell in row] for row in reader.rows]


class Charts:
    def __init__(self, run_dir: Path) -> None:
        reader: Any = importlib.import_module(READER)  # the module has no type annotations
        self._read = reader.EventAccumulator(
            str(run_dir / FOLDER), {reader.SCALARS: 0, reader.TENSORS: 0}
        )
        self._read.Reload()

    @property
    def names(self) -> set[str]:
        return set(self._read.Tags()["scalars"])

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of each point of a curve, in the order in which they were read."""
        return [(point.step, point.value) for point in self._read.Scalars(name)]

    def texts(self, name: str) -> list[tuple[int, str]]:
        """Return (step, text) of each text with a name."""
        if name not in self._read.Tags()["tensors"]:
            return []
        return [
            (event.step, text.decode())
            for event in self._read.Tensors(name)
            for text in event.tensor_proto.string_val
        ]

    def tables(self, name: str) -> list[tuple[int, list[list[str]]]]:
        """Return (step, rows) of each Markdown table with a name, as TensorBoard shows it: the
        first row has the columns."""
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            plugin: Any = importlib.import_module("tensorboard.plugin_util")
        return [
            (step, shown_cells(plugin.markdown_to_safe_html(text)))
            for step, text in self.texts(name)
        ]

    def all_points(self) -> dict[str, list[tuple[int, float]]]:
        return {name: self.points(name) for name in self.names}

    def steps(self, name: str = "training/global_step") -> list[int]:
        return [step for step, _ in self.points(name)]

    def times(self, name: str) -> list[float]:
        return [point.wall_time for point in self._read.Scalars(name)]
