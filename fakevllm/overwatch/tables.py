"""Tables of tasks, running episodes and clients. Each table shows a limited number of rows, and
below them the number of hidden rows. This module does no I/O."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fakevllm.overwatch.formatting import clean, format_duration, format_number
from fakevllm.overwatch.snapshot import RunningEpisode, Snapshot

MAX_TASKS, MAX_RUNNING, MAX_CLIENTS = 10, 10, 6
MAX_REWARDS = 8
"""Maximum number of rewards shown for a task."""
NO_ROWS = Text("none", "dim")
UUID_CHARS = 8
NEARLY_LOST = 0.75
"""An idle episode is shown in yellow when its idle time exceeds this share of its idle limit. At
the limit, the server takes the episode back from its client."""


def tasks_table(snapshot: Snapshot, is_narrow: bool) -> RenderableType:
    if not snapshot.tasks:
        return Text("no task has begun", "dim")
    table = _empty_table()
    _add_text_column(table, "task")
    table.add_column("ended", justify="right", no_wrap=True)
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    if not is_narrow:
        table.add_column("rewards", no_wrap=True, overflow="ellipsis", ratio=1)
    for task in snapshot.tasks[:MAX_TASKS]:
        row = [
            Text(clean(task.task_id)),
            f"{task.ended}/{task.wanted}",
            str(task.running or ""),
            format_number(task.mean),
        ]
        rewards = [format_number(reward) for reward in task.rewards[:MAX_REWARDS]]
        rewards += ["…"] * (len(task.rewards) > MAX_REWARDS)
        cells = row if is_narrow else [*row, " ".join(rewards)]
        table.add_row(*cells, style="dim" if task.is_complete else "")
    _add_rest(table, len(snapshot.tasks) - MAX_TASKS)
    return table


def running_table(snapshot: Snapshot, is_narrow: bool) -> RenderableType:
    if not snapshot.running:
        return NO_ROWS
    table = _empty_table()
    table.add_column("episode", no_wrap=True)
    _add_text_column(table, "task")
    if not is_narrow:
        table.add_column("client", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    for episode in snapshot.running[:MAX_RUNNING]:
        table.add_row(*_running_row(episode, is_narrow))
    _add_rest(table, len(snapshot.running) - MAX_RUNNING)
    return table


def _running_row(episode: RunningEpisode, is_narrow: bool) -> list[Text | str]:
    limit_s = episode.idle_limit_s
    limit = "" if limit_s is None or is_narrow else f" of {format_duration(limit_s)}"
    is_late = limit_s is not None and episode.idle_s > limit_s * NEARLY_LOST
    idle = Text(f"{format_duration(episode.idle_s)}{limit}", "yellow" if is_late else "")
    client = [] if is_narrow else [Text(_short_uuid(episode.client))]
    task = Text(clean(episode.task_id or "-"))
    return [Text(_short_uuid(episode.uuid)), task, *client, str(episode.calls), idle]


def clients_table(snapshot: Snapshot) -> RenderableType:
    if not snapshot.clients:
        return NO_ROWS
    table = _empty_table()
    _add_text_column(table, "client")
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    table.add_column("agreed", no_wrap=True)
    for client in snapshot.clients[:MAX_CLIENTS]:
        idle = "-" if client.idle_s is None else format_duration(client.idle_s)
        agreed = "yes" if client.has_agreed else ""
        table.add_row(Text(_short_uuid(client.uuid)), str(client.running or ""), idle, agreed)
    _add_rest(table, len(snapshot.clients) - MAX_CLIENTS)
    return table


def _empty_table() -> Table:
    return Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="dim")


def _add_text_column(table: Table, name: str) -> None:
    """Add a column that takes the remaining width of the table. A text that is too long is cut off
    with an ellipsis."""
    table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)


def _add_rest(table: Table, num_hidden: int) -> None:
    """If some rows are not shown, add a last row that gives the number of the hidden rows."""
    if num_hidden > 0:
        cells = [f"and {num_hidden:,} more", *[""] * (len(table.columns) - 1)]
        table.add_row(*cells, style="dim")


def _short_uuid(uuid: str) -> str:
    return clean(uuid)[:UUID_CHARS] or "-"
