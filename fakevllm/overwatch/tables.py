"""Tables of the picture: tasks, running episodes, clients. What does not fit is counted. Pure."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fakevllm.overwatch.snapshot import RunningEpisode, Snapshot
from fakevllm.overwatch.words import ago, clean, shown

MOST_TASKS, MOST_RUNNING, MOST_CLIENTS = 10, 10, 6
MOST_REWARDS = 8
NONE = Text("none", "dim")
UUID_CHARS = 8
NEARLY_LOST = 0.75
"""Of its idle limit: then an episode is shown in yellow."""


def tasks(shot: Snapshot, is_narrow: bool) -> RenderableType:
    if not shot.tasks:
        return Text("no task has begun", "dim")
    table = _table()
    _text_column(table, "task")
    table.add_column("ended", justify="right", no_wrap=True)
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    if not is_narrow:
        table.add_column("rewards", no_wrap=True, overflow="ellipsis", ratio=1)
    for task in shot.tasks[:MOST_TASKS]:
        row = [
            Text(clean(task.task_id)),
            f"{task.ended}/{task.wanted}",
            str(task.running or ""),
            shown(task.mean),
        ]
        rewards = [shown(reward) for reward in task.rewards[:MOST_REWARDS]]
        rewards += ["…"] * (len(task.rewards) > MOST_REWARDS)
        cells = row if is_narrow else [*row, " ".join(rewards)]
        table.add_row(*cells, style="dim" if task.is_whole else "")
    _rest(table, len(shot.tasks) - MOST_TASKS)
    return table


def running(shot: Snapshot, is_narrow: bool) -> RenderableType:
    if not shot.running:
        return NONE
    table = _table()
    table.add_column("episode", no_wrap=True)
    _text_column(table, "task")
    if not is_narrow:
        table.add_column("client", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    for episode in shot.running[:MOST_RUNNING]:
        table.add_row(*_episode(episode, is_narrow))
    _rest(table, len(shot.running) - MOST_RUNNING)
    return table


def _episode(episode: RunningEpisode, is_narrow: bool) -> list[Text | str]:
    limit = episode.idle_limit_s
    of = "" if limit is None or is_narrow else f" of {ago(limit)}"
    is_late = limit is not None and episode.idle_s > limit * NEARLY_LOST
    client = [] if is_narrow else [Text(_short(episode.client))]
    idle = Text(f"{ago(episode.idle_s)}{of}", "yellow" if is_late else "")
    name = Text(clean(episode.task_id or "-"))
    return [Text(_short(episode.uuid)), name, *client, str(episode.calls), idle]


def clients(shot: Snapshot) -> RenderableType:
    if not shot.clients:
        return NONE
    table = _table()
    _text_column(table, "client")
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    table.add_column("agreed", no_wrap=True)
    for client in shot.clients[:MOST_CLIENTS]:
        idle = "-" if client.idle_s is None else ago(client.idle_s)
        agreed = "yes" if client.has_agreed else ""
        table.add_row(Text(_short(client.uuid)), str(client.running or ""), idle, agreed)
    _rest(table, len(shot.clients) - MOST_CLIENTS)
    return table


def _table() -> Table:
    return Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="dim")


def _text_column(table: Table, name: str) -> None:
    table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)


def _rest(table: Table, number: int) -> None:
    if number > 0:
        cells = [f"and {number:,} more", *[""] * (len(table.columns) - 1)]
        table.add_row(*cells, style="dim")


def _short(uuid: str) -> str:
    return clean(uuid)[:UUID_CHARS] or "-"
