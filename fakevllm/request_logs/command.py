"""Run `fakevllm import`: read a log line by line, and write the rows of the dataset."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from rich.console import Console
from rich.text import Text

from fakevllm.errors import ConfigError, UserError
from fakevllm.request_logs.log_formats import NotImported, entries_of, row_of
from fakevllm.runtime.new_file import new_file
from fakevllm.runtime.plurals import counted

MAX_LISTED = 5
"""Maximum number of lines without JSON that are listed."""


@dataclass(slots=True)
class ImportCounts:
    """The number of log entries that became dataset rows, and the number of skipped entries."""

    num_rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Number of entries without a row, by the slug of the reason."""
    num_broken: int = 0
    broken_lines: list[int] = field(default_factory=list[int])
    """Line numbers of the first lines that are not JSON."""


def run_import(log: Path, target: Path, console: Console | None = None) -> None:
    """Write the rows of the dataset, and print the number of rows.

    Raises UserError if the log cannot be read, if it has no request, or if the dataset cannot be
    written.
    """
    if target.suffix != ".jsonl":
        raise ConfigError(f"--to {target} has an unknown type: end its name with .jsonl.")
    if _is_same_file(log, target):
        raise ConfigError(f"--to {target} is the log itself: name another file.")
    counts = ImportCounts()
    with new_file(target) as file:
        for row in _rows(log, counts):
            file.write(row)
        if not counts.num_rows:
            raise UserError(_nothing(log, counts))
    (console or Console()).print(_summary(log, target, counts), soft_wrap=True)


def _rows(log: Path, counts: ImportCounts) -> Iterator[bytes]:
    for number, line in enumerate(_lines(log), start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            value: object = orjson.loads(line)
        except orjson.JSONDecodeError:
            counts.num_broken += 1
            if len(counts.broken_lines) < MAX_LISTED:
                counts.broken_lines.append(number)
            continue
        for entry in entries_of(value):
            try:
                row = orjson.dumps(row_of(entry), option=orjson.OPT_APPEND_NEWLINE)
            except NotImported as reason:
                counts.skipped[str(reason)] += 1
            except orjson.JSONEncodeError:  # it is nested too deep, for example
                counts.skipped["nested_too_deep"] += 1
            else:
                counts.num_rows += 1
                yield row


def _is_same_file(log: Path, target: Path) -> bool:
    """Return True if both names refer to one existing file, also through links."""
    try:
        return log.samefile(target)
    except OSError:  # one of them does not exist, and reading or writing it says so
        return False


def _lines(log: Path) -> Iterator[bytes]:
    try:
        with log.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"The log {log} cannot be read: {error.strerror}.") from None


def _nothing(log: Path, counts: ImportCounts) -> str:
    if counts.num_broken:
        return (
            f"{log} has no request, so no file was written: line {counts.broken_lines[0]} is not "
            "JSON. The log must be JSON Lines, with one request per line."
        )
    if not counts.skipped:
        return f"{log} is empty, so no file was written."
    return (
        f"{log} has no request that can be replayed, so no file was written: "
        f"{_skipped(counts)}. The page docs/export.md explains these reasons."
    )


def _summary(log: Path, target: Path, counts: ImportCounts) -> Text:
    text = Text(f"{target}: {counted(counts.num_rows, 'row')} from {log}")
    if counts.skipped:
        text.append(f"\n{counts.skipped.total()} skipped: {_skipped(counts)}")
    if counts.num_broken:
        lines = ", ".join(map(str, counts.broken_lines))
        more = ", …" if counts.num_broken > len(counts.broken_lines) else ""
        are = counted(counts.num_broken, "line", "are not JSON", "is not JSON")
        text.append(f"\n{are}: {lines}{more}", "red")
    return text.append(
        f"\nSend the requests through a running proxy:\n    fakevllm replay --dataset {target}"
    )


def _skipped(counts: ImportCounts) -> str:
    return ", ".join(f"{num} {reason}" for reason, num in counts.skipped.most_common())
