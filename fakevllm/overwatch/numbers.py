"""The numbers beside the curve: speed, the last step, drift and mismatch, branches. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from fakevllm.overwatch.snapshot import Snapshot
from fakevllm.overwatch.words import clean, shown

BRANCH = "branch_"
OF_CLIENTS = "train_"
MOST_OF_CLIENTS = 6
ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("update", (("loss", "loss"), ("kl", "kl"), ("grad", "grad_norm"), ("entropy", "entropy"))),
    ("mismatch", (("k3", "mismatch_k3"), ("ess", "ess"), ("fidelity", "token_fidelity"))),
    ("drift", (("rate", "drift_rate"), ("branches", "branch_rate"))),
    ("forest", (("rho", "rho"), ("times as quick", "forest_speedup"))),
    ("trained", (("of what could be", "sample_coverage"), ("ties", "tie_rate"))),
)
"""Of the last step: a line, and what stands in it, by the metric's name. What was not measured is
left out."""


def table(shot: Snapshot) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for name, told in _rows(shot):
        grid.add_row(name, Text(told))
    return grid


def _rows(shot: Snapshot) -> Iterator[tuple[str, str]]:
    metrics = shot.metrics or {}
    if "reward_mean" in metrics:
        low, high = shown(metrics.get("reward_min")), shown(metrics.get("reward_max"))
        yield "reward", f"{shown(metrics['reward_mean'])}, from {low} to {high}"
    if shot.evaluations:
        last = shot.evaluations[-1]
        told = f"{shown(last.reward)}, from {shown(last.low)} to {shown(last.high)}"
        number = f"{last.episodes} episode{'s' * (last.episodes != 1)}"
        yield "evaluated", f"{told}, {number} at step {last.step}"
    if shot.speed is not None:
        speed = shot.speed
        sampled, trained = shown(speed.sampled_per_s), shown(speed.trained_per_s)
        yield "tokens/s", f"{sampled} sampled, {trained} trained, a step in {shown(speed.step_s)} s"
    for name, members in ROWS:
        found = [f"{word} {shown(metrics[key])}" for word, key in members if key in metrics]
        if found:
            yield name, ", ".join(found)
    if told := _branches(shot.totals or {}):
        yield "branched", f"{told} in the run"
    yield from _of_clients(metrics)


def _branches(totals: Mapping[str, float]) -> str:
    """By cause; a call that goes on where one ended is no branch, nor is a first one."""
    of_cause = {
        name.removeprefix(BRANCH): number
        for name, number in totals.items()
        if name.startswith(BRANCH) and name not in ("branch_rate", "branch_first", "branch_extends")
    }
    most_first = sorted(of_cause.items(), key=lambda one: -one[1])
    return ", ".join(f"{number:.0f} {clean(name).replace('_', ' ')}" for name, number in most_first)


def _of_clients(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """What clients measured themselves."""
    told = [name for name in metrics if name.startswith(OF_CLIENTS)]
    parts = [
        f"{clean(name.removeprefix(OF_CLIENTS))} {shown(metrics[name])}"
        for name in told[:MOST_OF_CLIENTS]
    ]
    parts += [f"and {len(told) - MOST_OF_CLIENTS} more"] * (len(told) > MOST_OF_CLIENTS)
    if parts:
        yield "by clients", ", ".join(parts)
