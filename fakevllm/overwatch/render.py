"""The picture of a snapshot, at a given width. Pure; what others said cannot drive the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fakevllm.overwatch import numbers, tables
from fakevllm.overwatch.chart import bounds, chart
from fakevllm.overwatch.history import LogLine
from fakevllm.overwatch.snapshot import Snapshot
from fakevllm.overwatch.words import ago, clean, counted, shown
from fakevllm_adapters.protocol.closed_run import FINISHED

TWO_COLUMNS_FROM = 100
NARROW_BELOW = 60
CHART_ROWS, EVALUATION_ROWS = 5, 3
MOST_LINES, MOST_NOTICES = 10, 4
SLOW_BOOT_S = 300.0
"""A large model takes minutes; after these somebody should look."""
COLOURS = {
    "ROLLING": "green",
    "ROLLING_POST": "cyan",
    "WEIGHT_SYNCING": "cyan",
    "BOOTING": "yellow",
    "OFFLINE": "red",
    "AWAY": "red",
}
MEANS = {
    "ROLLING": "collects",
    "ROLLING_POST": "waits for the last episodes of the step",
    "WEIGHT_SYNCING": "trains",
    "BOOTING": "the engine is being started",
    "OFFLINE": "no engine runs",
    "AWAY": "no server tells of itself",
}
NO_MORE_STEPS = {FINISHED: "has taken its last step, and serves on"}
"""By why it takes none; what went wrong has words of its own."""


def drawn(shot: Snapshot, width: int) -> RenderableType:
    head = _panel("overwatch", Group(*_head(shot)))
    return head if shot.seen_at is None else Group(head, *_middle(shot, width), _log(shot))


def _middle(shot: Snapshot, width: int) -> list[RenderableType]:
    is_narrow = width < NARROW_BELOW
    collected = _panel("batch", Group(*_batch(shot), tables.tasks(shot, is_narrow)))
    playing = _panel(f"running {len(shot.running)}", tables.running(shot, is_narrow))
    people = _panel(f"clients {len(shot.clients)}", tables.clients(shot))
    if width >= TWO_COLUMNS_FROM:
        half = width // 2
        learning = _panel("learning", Group(*_learning(shot, half - 4)))
        sides = Table.grid(expand=True)
        sides.add_column(width=half)
        sides.add_column(ratio=1)
        sides.add_row(Group(collected, playing), Group(learning, people))
        return [sides]
    learning = _panel("learning", Group(*_learning(shot, width - 4)))
    return [collected, playing, people, learning]


def _panel(title: str, inside: RenderableType) -> Panel:
    return Panel(inside, title=title, title_align="left", border_style="dim")


# --- the head


def _head(shot: Snapshot) -> Iterator[Text]:
    state = Text.assemble(
        (shot.state, f"bold {COLOURS.get(shot.state, 'white')}"),
        (f"  {_meaning(shot)}", "dim"),
    )
    if shot.is_paused:
        state.append("  claims are paused", "bold yellow")
    yield state
    if shot.seen_at is not None:
        facts = [_step(shot), f"version {shot.version}", clean(shot.model or "")]
        yield Text(" · ".join(filter(None, [*facts, clean(shot.run_id)[:8]])))
    yield Text(clean(shot.url), "dim")
    if shot.booting_s is not None:
        is_slow = shot.booting_s >= SLOW_BOOT_S
        hint = ": if it stays so, look into engine.log in the run directory" if is_slow else ""
        yield Text(f"booting for {ago(shot.booting_s)}{hint}", "yellow" if is_slow else "dim")
    if shot.trouble is not None:
        yield Text(clean(shot.trouble), "red")
        if shot.seen_at is not None:
            yield Text(f"what follows was so {ago(shot.at - shot.seen_at)} ago", "yellow")
    if shot.detail is not None:
        yield Text(clean(shot.detail), "yellow")


def _step(shot: Snapshot) -> str:
    if shot.step and shot.closed == FINISHED:
        return f"step {shot.step - 1}"  # the one behind it is not taken
    return f"step {shot.step or '-'}"


def _meaning(shot: Snapshot) -> str:
    if shot.state == "ROLLING" and shot.closed is not None:
        return NO_MORE_STEPS.get(shot.closed, "serves, and takes no more steps")
    return MEANS.get(shot.state, "")


# --- the batch


def _batch(shot: Snapshot) -> Iterator[RenderableType]:
    if shot.batch is None:
        yield Text("nothing is told of a batch", "dim")
        return
    bars = Table.grid(padding=(0, 2, 0, 0), expand=True)
    bars.add_column(no_wrap=True)
    bars.add_column(no_wrap=True, justify="right")
    bars.add_column(ratio=1)
    batch = shot.batch
    if batch.tasks_wanted:
        _bar(bars, "tasks", batch.tasks, batch.tasks_wanted)
        _bar(bars, "with signal", batch.tasks_with_signal, batch.tasks_wanted)
    _bar(bars, "episodes", batch.episodes, batch.episodes_wanted)
    yield bars
    if waits := counted(shot.waiting or {}):
        yield Text(f"held: {waits}", "dim")
    if dropped := counted(shot.dropped or {}):
        yield Text(f"dropped in the run: {dropped}", "dim")


def _bar(bars: Table, name: str, done: int, wanted: int) -> None:
    total, completed = max(wanted, 1), min(done, wanted)
    bar = ProgressBar(
        total=total, completed=completed, complete_style="cyan", finished_style="green"
    )
    bars.add_row(name, f"{done}/{wanted}", bar)


# --- learning


def _learning(shot: Snapshot, width: int) -> Iterator[RenderableType]:
    yield from _curves(shot, width)
    yield numbers.table(shot)


def _curves(shot: Snapshot, width: int) -> Iterator[Text]:
    """Steps stand below each other; a single evaluation is told by the numbers alone."""
    if not shot.curve:
        yield Text("no step has been trained yet", "dim")
        return
    trained = {point.step: point.reward for point in shot.curve}
    evaluated = {point.step: point.reward for point in shot.evaluations}
    known = trained | evaluated
    steps = range(min(known), max(known) + 1)
    drawn = list(_curve(trained, steps, width, CHART_ROWS, "green"))
    yield from drawn or [Text("no step has a reward that is a number", "yellow")]
    if drawn:
        yield _caption("mean reward", trained)
    if len(evaluated) > 1:
        yield from _curve(evaluated, steps, width, EVALUATION_ROWS, "cyan")
        yield _caption("mean reward of evaluations", evaluated)


def _curve(
    values: Mapping[int, float], steps: range, width: int, num_rows: int, colour: str
) -> Iterator[Text]:
    """Nothing where no value is a number."""
    columns = max(8, width - 9)
    along = [values.get(step, math.nan) for step in steps]
    found = bounds(along, columns)
    if found is None:
        return
    labels = {0: shown(found[1]), num_rows - 1: shown(found[0])}
    for place, row in enumerate(chart(along, columns, num_rows)):
        yield Text.assemble((f"{labels.get(place, ''):>7} ", "dim"), (row, colour), no_wrap=True)


def _caption(told: str, values: Mapping[int, float]) -> Text:
    return Text(f"{'':>7} {told}, steps {min(values)} to {max(values)}", "dim")


# --- the log


def _log(shot: Snapshot) -> Panel:
    lines = [
        Text(_line(line), "yellow" if line.is_trouble else "") for line in shot.lines[-MOST_LINES:]
    ]
    for notice in shot.notices[-MOST_NOTICES:]:
        tag = f"{clean(notice.tag)}: " if notice.tag else ""
        told = Text.assemble((f"{ago(shot.at - notice.at)} ago  ", "dim"), (tag, "cyan"))
        lines.append(told.append(clean(notice.message)))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return _panel("log", Group(*(lines or [Text("nothing yet", "dim")])))


def _line(line: LogLine) -> str:
    return clean(line.text) + (f"  ({line.times} times)" if line.times > 1 else "")
