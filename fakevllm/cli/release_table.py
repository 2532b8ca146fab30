"""The tables and the JSON of `fakevllm release status` and `fakevllm release history`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from fakevllm.cli.status_table import as_table
from fakevllm.release.evidence_text import difference, ranges
from fakevllm.runtime.terminal_text import printable
from fakevllm_adapters.protocol.releases import Decision, ReleaseRecord, ReleasesReply

if TYPE_CHECKING:
    from rich.console import RenderableType


def status_table(url: str, history: ReleasesReply) -> RenderableType:
    """Return the state of the releases (such as which weights are released) as a table."""
    return as_table(url, _status_rows(history))


def status_json(history: ReleasesReply) -> str:
    """Return the state of the releases (such as which weights are released) as JSON."""
    state = history.model_dump(mode="json", exclude={"records"})
    latest = history.records[-1].model_dump(mode="json") if history.records else None
    return json.dumps(state | {"latest": latest}, indent=2)


def history_json(records: Sequence[ReleaseRecord]) -> str:
    """Return `records`, the decisions about releasing versions of the weights, as JSON."""
    return json.dumps([record.model_dump(mode="json") for record in records], indent=2)


def history_table(records: Sequence[ReleaseRecord]) -> RenderableType:
    """Return all decisions about releasing versions of the weights as a table, oldest first."""
    from rich.table import Table
    from rich.text import Text

    if not records:
        return Text("No version was evaluated, released or rejected yet: version 0 is released.")
    table = Table()
    for name in ("number", "time", "decision", "version", "from", "by", "difference", "pairs"):
        is_text = name in ("time", "decision", "by")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for record in records:
        cells = (
            str(record.number),
            _time(record),
            record.decision.value,
            _number(record.version),
            _number(record.parent),
            record.decided_by,
            difference(record.evidence),
            _number(record.evidence.get("pairs")),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _status_rows(history: ReleasesReply) -> Iterator[tuple[str, str]]:
    yield "released", f"version {history.released}"
    yield "candidate", "none" if history.candidate is None else f"version {history.candidate}"
    yield "rejected", ranges(sorted(history.rejected))
    if history.is_held:
        yield "on hold", "no version is released until `fakevllm release resume`"
    if history.records:
        yield "latest decision", _summary(history.records[-1])


def _summary(record: ReleaseRecord) -> str:
    version = "" if record.version is None else f" version {record.version}"
    figures = difference(record.evidence)
    if record.decision in (Decision.HOLD, Decision.RESUME) or figures == "-":
        figures = ""
    text = f"{record.decision.value}{version} by {record.decided_by} at {_time(record)}"
    return f"{text}, difference {figures}" if figures else text


def _time(record: ReleaseRecord) -> str:
    return datetime.fromtimestamp(record.time_s).isoformat(" ", timespec="seconds")


def _number(number: object) -> str:
    return "-" if number is None else str(number)
