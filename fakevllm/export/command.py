"""Run `fakevllm export`: select groups, convert them to rows, and write the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

import orjson
from rich.console import Console
from rich.text import Text

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.errors import UserError
from fakevllm.export.columns import Columns, ColumnType
from fakevllm.export.conversation import NotExported
from fakevllm.export.dataset_files import EncodedRow, RowFile, dataset_file
from fakevllm.export.group_reader import GroupReader
from fakevllm.export.row_formats import FORMATS, row_of
from fakevllm.ledger.broken_rows import READ_ERRORS, BrokenGroup
from fakevllm.ledger.offline_copy import offline_ledger
from fakevllm.ledger.selection import GroupSelection, SelectedGroups
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.progress_bar import progress_bar
from fakevllm.runtime.terminal_text import printable
from fakevllm.settlement.held_out_groups import has_held_out_rows
from fakevllm_adapters.protocol.swarm import Task

MAX_LISTED = 5
"""Maximum number of unreadable groups that are listed."""
_FEATURES = {
    ColumnType.TEXT: 'Value("string")',
    ColumnType.INTEGER: 'Value("int64")',
    ColumnType.NUMBER: 'Value("float64")',
    ColumnType.FLAG: 'Value("bool")',
    ColumnType.OBJECT: "Json()",
    ColumnType.OBJECTS: "List(Json())",
}
"""The types of columns in the package `datasets`."""
_NO_HELD_OUT_ROWS = (
    "release.eval_dataset is not set, so requests with held-out rows may be in the file: "
    "name the configuration of the proxy with --config."
)


@dataclass(frozen=True, slots=True)
class ExportSettings:
    ledger: Path
    format_name: str
    """Name of the format, a key of FORMATS."""
    target: Path
    where: str | None = None
    """SQL expression over the columns of the view `groups`; None selects all groups."""
    last: int | None = None
    """Number of the newest groups to export; None means all."""
    min_difference: float | None = None
    """Minimum difference between the rewards of two answers that form a preference pair; None means
    any difference."""
    held_out: HeldOutRows = field(default_factory=HeldOutRows)
    """Dataset rows that are never trained. Requests that quote such a row are not exported."""
    tasks: Mapping[str, Task] = field(default_factory=dict[str, Task])
    """Rows of the dataset file by the ids of their tasks."""


@dataclass(slots=True)
class ExportCounts:
    """The numbers of groups that were exported as a row, were skipped, or could not be read."""

    num_rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Number of groups without a row, by the slug of the reason."""
    num_broken: int = 0
    models: Counter[str] = field(default_factory=Counter[str])
    """Number of rows per model. The model is the one that the request names."""
    broken: list[BrokenGroup] = field(default_factory=list[BrokenGroup])
    """The first groups whose rows in the ledger cannot be read."""

    def add_broken(self, group: BrokenGroup) -> None:
        self.num_broken += 1
        if len(self.broken) < MAX_LISTED:
            self.broken.append(group)


def run_export(settings: ExportSettings, console: Console | None = None) -> None:
    """Write the selected groups to the dataset file, and print the number of its rows.

    Raises UserError for mistakes that the user can fix, and if the file would have no row.
    """
    if settings.min_difference is not None and settings.format_name != "preference":
        raise UserError("--min-difference works only with --as preference: remove it.")
    file = offline_ledger(settings.ledger)
    groups = GroupSelection(file, settings.where, settings.last).find()
    counts = ExportCounts()
    with dataset_file(settings.target, FORMATS[settings.format_name].columns) as rows:
        with closing(_rows(settings, file, groups, counts, rows)) as new_rows:
            for row in new_rows:
                rows.write(row)
        if not counts.num_rows:
            raise UserError(_nothing(settings, groups.count, counts))
    has_unknown_rows = not settings.held_out and has_held_out_rows(file)
    summary = _summary(settings, groups.count, counts, has_unknown_rows=has_unknown_rows)
    (console or Console()).print(summary, soft_wrap=True)


def _rows(
    settings: ExportSettings,
    file: Path,
    groups: SelectedGroups,
    counts: ExportCounts,
    target: RowFile,
) -> Generator[EncodedRow]:
    row_format, difference = FORMATS[settings.format_name], settings.min_difference or 0.0
    ledger = Ledger.open(file)
    reader = GroupReader(ledger, settings.held_out, settings.tasks)
    try:
        with progress_bar() as bar:
            bar_task = bar.add_task("groups", total=groups.count)
            for group_id in groups.ids():
                bar.update(bar_task, advance=1)
                try:
                    group = reader.read(group_id)
                    row = target.encode(row_of(row_format, group, difference))
                except NotExported as reason:
                    counts.skipped[str(reason)] += 1
                except READ_ERRORS as error:
                    counts.add_broken(BrokenGroup.of(group_id, error))
                else:
                    counts.num_rows += 1
                    counts.models[group.record.model] += 1
                    yield row
    finally:
        ledger.close()


def _nothing(settings: ExportSettings, num_groups: int, counts: ExportCounts) -> str:
    if not num_groups:
        return f"No group in {settings.ledger} meets the condition, so no file was written."
    reasons = [*_skipped(counts), *([f"{counts.num_broken} unreadable"] * bool(counts.num_broken))]
    return (
        f"No row for --as {settings.format_name}, so no file was written. "
        f"{counted(num_groups, 'group')}: {', '.join(reasons)}. "
        "The page docs/export.md explains these reasons."
    )


def _summary(
    settings: ExportSettings, num_groups: int, counts: ExportCounts, *, has_unknown_rows: bool
) -> Text:
    text = Text(
        f"{settings.target}: {counted(counts.num_rows, 'row')} as {settings.format_name}, "
        f"from {counted(num_groups, 'group')}"
    )
    if counts.skipped:
        skipped = counted(counts.skipped.total(), "group")
        text.append(f"\n{skipped} skipped: {', '.join(_skipped(counts))}")
    if has_unknown_rows:
        text.append(f"\n{_NO_HELD_OUT_ROWS}", "yellow")
    if len(counts.models) > 1:
        text.append(f"\n{_models(counts)}", "yellow")
    if counts.num_broken:
        broken = counted(counts.num_broken, "group")
        are = "is" if counts.num_broken == 1 else "are"
        text.append(f"\n{broken} cannot be read and {are} not exported:", "red")
        for one in counts.broken:
            text.append(f"\n  {one.group_id}: {printable(one.error)}", "red")
    lines = load_lines(settings.target, FORMATS[settings.format_name].columns)
    return text.append(f"\nLoad the rows in Python:\n{indent(lines, '    ')}")


def _models(counts: ExportCounts) -> str:
    """Return a line that warns of several models in one export, because their answers may differ in
    quality."""
    numbers = [f"{printable(name)} ({num})" for name, num in counts.models.most_common(MAX_LISTED)]
    more = ", …" if len(counts.models) > MAX_LISTED else ""
    condition = "\"model = 'NAME'\""
    return (
        f"The requests name {len(counts.models)} models: {', '.join(numbers)}{more}. "
        f"--where {condition} selects one."
    )


def _skipped(counts: ExportCounts) -> list[str]:
    return [f"{num} {reason}" for reason, num in counts.skipped.most_common()]


def load_lines(target: Path, columns: Columns) -> str:
    """Return lines of Python code that load the file `target`.

    For a JSON Lines file, the code gives the types of the columns. Without these types, the package
    `datasets` would infer them from the first rows, and would convert texts that look like dates
    into timestamps.
    """
    name = orjson.dumps(str(target)).decode()
    if target.suffix == ".parquet":
        return (
            "from datasets import load_dataset\n"
            f'rows = load_dataset("parquet", data_files={name}, split="train")'
        )
    types = ", ".join(f'"{name}": {_FEATURES[columns[name]]}' for name in columns)
    return (
        "from datasets import Features, Json, List, Value, load_dataset\n"
        f"features = Features({{{types}}})\n"
        f'rows = load_dataset("json", data_files={name}, split="train", features=features)'
    )
