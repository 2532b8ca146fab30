"""Draw a snapshot of a server at a given width. This module does no I/O.

Texts from the server, its clients and users are escaped, because control characters in them could
control the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fakevllm.overwatch.chart import bounds, chart
from fakevllm.overwatch.formatting import clean, format_counts, format_duration, format_number
from fakevllm.overwatch.history import LogLine
from fakevllm.overwatch.metrics_table import metrics_table
from fakevllm.overwatch.snapshot import Snapshot
from fakevllm.overwatch.tables import clients_table, running_table, tasks_table
from fakevllm_adapters.protocol.replica_text import replica_line
from fakevllm_adapters.protocol.run_finished import FINISHED

TWO_COLUMNS_FROM = 100
NARROW_BELOW = 60
CHART_ROWS, EVALUATION_ROWS = 5, 3
MAX_LINES, MAX_NOTICES = 10, 4
MAX_BREAKS = 2
"""Maximum number of gaps in the curve that are explained below the chart. If there are more gaps,
only the newest gaps are explained."""
SLOW_BOOT_S = 300.0
"""Seconds of booting after which the screen refers the user to engine.log. The engine of a large
model needs some minutes to boot."""
STATE_COLOURS = {
    "ROLLING": "green",
    "ROLLING_POST": "cyan",
    "WEIGHT_SYNCING": "cyan",
    "BOOTING": "yellow",
    "OFFLINE": "red",
    "AWAY": "red",
}
STATE_MEANINGS = {
    "ROLLING": "collects groups for the next step",
    "ROLLING_POST": "waits for the last episodes of the step",
    "WEIGHT_SYNCING": "trains and publishes the weights",
    "BOOTING": "the engine is being started",
    "OFFLINE": "no engine runs",
    "AWAY": "the server does not answer",
}
CLOSED_MEANINGS = {FINISHED: "has taken its last step and still serves requests"}
"""Explanations of the state ROLLING for a run that takes no more training steps. Each key is a
reason why the run takes no more steps. All other reasons are errors, which the server describes
itself."""


def render_snapshot(snapshot: Snapshot, width: int) -> RenderableType:
    """Return the drawing of a snapshot, `width` characters wide.

    If no poll of the server has succeeded yet, the drawing consists only of the panel at the top.
    """
    head = _panel("overwatch", Group(*_head(snapshot)))
    if snapshot.seen_at is None:
        return head
    return Group(head, *_middle(snapshot, width), _log_panel(snapshot))


def _middle(snapshot: Snapshot, width: int) -> list[RenderableType]:
    """Return the panels that are shown between the top panel and the log: batch, running episodes,
    clients and learning. On a wide screen, they are arranged in two columns."""
    is_narrow = width < NARROW_BELOW
    batch = _panel("batch", Group(*_batch(snapshot), tasks_table(snapshot, is_narrow)))
    running = _panel(f"running {len(snapshot.running)}", running_table(snapshot, is_narrow))
    clients = _panel(f"clients {len(snapshot.clients)}", clients_table(snapshot))
    if width >= TWO_COLUMNS_FROM:
        half = width // 2
        learning = _panel("learning", Group(*_learning(snapshot, half - 4)))
        columns = Table.grid(expand=True)
        columns.add_column(width=half)
        columns.add_column(ratio=1)
        columns.add_row(Group(batch, running), Group(learning, clients))
        return [columns]
    learning = _panel("learning", Group(*_learning(snapshot, width - 4)))
    return [batch, running, clients, learning]


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


# --- the head


def _head(snapshot: Snapshot) -> Iterator[Text]:
    state = Text.assemble(
        (snapshot.state, f"bold {STATE_COLOURS.get(snapshot.state, 'white')}"),
        (f"  {_state_meaning(snapshot)}", "dim"),
    )
    if snapshot.is_paused:
        state.append("  claims are paused", "bold yellow")
    yield state
    if snapshot.seen_at is not None:
        released = "" if snapshot.released is None else f"released {snapshot.released}"
        facts = [_step(snapshot), f"version {snapshot.version}", released]
        facts.append(clean(snapshot.model or ""))
        yield Text(" · ".join(filter(None, [*facts, clean(snapshot.run_id)[:8]])))
    yield Text(clean(snapshot.url), "dim")
    if snapshot.booting_s is not None:
        is_slow = snapshot.booting_s >= SLOW_BOOT_S
        hint = "; see engine.log in the run directory" if is_slow else ""
        duration = format_duration(snapshot.booting_s)
        yield Text(f"booting for {duration}{hint}", "yellow" if is_slow else "dim")
    if snapshot.trouble is not None:
        yield Text(clean(snapshot.trouble), "red")
        if snapshot.seen_at is not None:
            age = format_duration(snapshot.at - snapshot.seen_at)
            yield Text(f"the data below is {age} old", "yellow")
    if snapshot.detail is not None:
        yield Text(clean(snapshot.detail), "yellow")
    for replica in snapshot.replicas:
        colour = "dim" if replica.state == "serving" else "yellow"
        yield Text(clean(f"{replica.name}: {replica_line(replica.model_dump())}"), colour)


def _step(snapshot: Snapshot) -> str:
    """Return the text "step N". N is the number of the step for which the server collects a batch.
    If the run has finished, N is the number of its last step."""
    if snapshot.step and snapshot.closed == FINISHED:
        return f"step {snapshot.step - 1}"
    return f"step {snapshot.step or '-'}"


def _state_meaning(snapshot: Snapshot) -> str:
    if snapshot.state == "ROLLING" and snapshot.closed is not None:
        return CLOSED_MEANINGS.get(snapshot.closed, "serves requests and takes no more steps")
    return STATE_MEANINGS.get(snapshot.state, "")


# --- the batch


def _batch(snapshot: Snapshot) -> Iterator[RenderableType]:
    if snapshot.batch is None:
        yield Text("the server does not report its batch", "dim")
        return
    bars = Table.grid(padding=(0, 2, 0, 0), expand=True)
    bars.add_column(no_wrap=True)
    bars.add_column(no_wrap=True, justify="right")
    bars.add_column(ratio=1)
    batch = snapshot.batch
    if batch.tasks_wanted:
        _add_bar(bars, "tasks", batch.tasks, batch.tasks_wanted)
        _add_bar(bars, "with signal", batch.tasks_with_signal, batch.tasks_wanted)
    _add_bar(bars, "episodes", batch.episodes, batch.episodes_wanted)
    yield bars
    if waiting := format_counts(snapshot.waiting or {}):
        yield Text(f"waiting: {waiting}", "dim")
    if dropped := format_counts(snapshot.dropped or {}):
        yield Text(f"dropped in the run: {dropped}", "dim")


def _add_bar(bars: Table, name: str, done: int, wanted: int) -> None:
    total, completed = max(wanted, 1), min(done, wanted)
    bar = ProgressBar(
        total=total, completed=completed, complete_style="cyan", finished_style="green"
    )
    bars.add_row(name, f"{done}/{wanted}", bar)


# --- learning


def _learning(snapshot: Snapshot, width: int) -> Iterator[RenderableType]:
    yield from _charts(snapshot, width)
    yield metrics_table(snapshot)


def _charts(snapshot: Snapshot, width: int) -> Iterator[Text]:
    """Yield the lines of the chart of training rewards, then the lines of the chart of evaluations.

    The horizontal axis of both charts shows the same range of steps. If fewer than two steps were
    evaluated, the chart of evaluations is left out. The table of metrics shows the last evaluation
    anyway.
    """
    if not snapshot.curve:
        yield Text("no step has been trained yet", "dim")
        return
    trained = {point.step: point.reward for point in snapshot.curve}
    evaluated = {point.step: point.reward for point in snapshot.evaluations}
    all_steps = trained | evaluated
    steps = range(min(all_steps), max(all_steps) + 1)
    changes = {point.step: point.changed for point in snapshot.curve if point.changed}
    rows = list(_chart_rows(trained, steps, width, CHART_ROWS, "green", changes))
    yield from rows or [Text("no step has a finite reward", "yellow")]
    if rows:
        yield _caption("mean reward", trained)
        yield from (_break_caption(step, what) for step, what in [*changes.items()][-MAX_BREAKS:])
    if len(evaluated) > 1:
        yield from _chart_rows(evaluated, steps, width, EVALUATION_ROWS, "cyan", changes)
        yield _caption("mean reward of evaluations", evaluated)


def _chart_rows(
    values: Mapping[int, float],
    steps: range,
    width: int,
    num_rows: int,
    colour: str,
    breaks: Container[int] = (),
) -> Iterator[Text]:
    """Yield the rows of a chart with its axis labels. If no value is finite, yield nothing.

    The chart has a gap before each step in `breaks`. At such a step something changed, for example
    the reward hooks. Rewards before and after the change cannot be compared.
    """
    num_columns = max(8, width - 9)
    # A column shows the mean of several steps. A gap this wide contains at least one whole column.
    gap = [math.nan] * (2 * math.ceil(len(steps) / num_columns))
    series: list[float] = []
    for step in steps:
        series += gap if step in breaks else []
        series.append(values.get(step, math.nan))
    axis = bounds(series, num_columns)
    if axis is None:
        return
    low, high = axis
    labels = {0: format_number(high), num_rows - 1: format_number(low)}
    for number, row in enumerate(chart(series, num_columns, num_rows)):
        label = labels.get(number, "")
        yield Text.assemble((f"{label:>7} ", "dim"), (row, colour), no_wrap=True)


def _caption(title: str, values: Mapping[int, float]) -> Text:
    return Text(f"{'':>7} {title}, steps {min(values)} to {max(values)}", "dim")


def _break_caption(step: int, what: str) -> Text:
    return Text(f"{'':>7} step {step}: {clean(what)}; earlier rewards are not comparable", "yellow")


# --- the log


def _log_panel(snapshot: Snapshot) -> Panel:
    lines = [
        Text(_format_line(line), "yellow" if line.is_trouble else "")
        for line in snapshot.lines[-MAX_LINES:]
    ]
    for notice in snapshot.notices[-MAX_NOTICES:]:
        age = format_duration(snapshot.at - notice.at)
        tag = f"{clean(notice.tag)}: " if notice.tag else ""
        text = Text.assemble((f"{age} ago  ", "dim"), (tag, "cyan"))
        lines.append(text.append(clean(notice.message)))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return _panel("log", Group(*(lines or [Text("nothing yet", "dim")])))


def _format_line(line: LogLine) -> str:
    return clean(line.text) + (f"  ({line.times} times)" if line.times > 1 else "")
