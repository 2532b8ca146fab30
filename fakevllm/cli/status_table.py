"""The table that `fakevllm status` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from fakevllm.runtime.admin_client import Json, fetch_json, proxy_root
from fakevllm.runtime.status_rows import arm_rows, status_rows
from fakevllm.runtime.terminal_text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def status_table(url: str, key: str | None, run: str = "") -> RenderableType:
    """Fetch the statistics of the proxy at `url`, and return them as a table. Raises ConfigError if
    the statistics cannot be fetched.

    `run` is the beginning of the id of the training run whose learning curve is shown. An empty
    string means the newest run.
    """
    stats = fetch_json(url, f"/fakevllm/stats?{urlencode({'run': run, 'curve': 'ends'})}", key)
    table = as_table(proxy_root(url), status_rows(stats))
    arms: Json | None = stats.get("arms")
    if arms is None:
        return table
    from rich.console import Group

    rows = arm_rows(arms, is_gated=stats.get("release") is not None)
    return Group(table, as_table("how much did training help", rows))


def as_table(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Return a table with one row per pair (name, value). Values are printed literally, even if
    they look like markup of the library rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=Text(title), show_header=False)
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    return table
