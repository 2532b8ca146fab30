"""The table below the charts of `fakevllm overwatch`. It shows rewards, speed, and the metrics of
the last training step.

The table also shows how many model calls did not continue an earlier call of their conversation,
with one number for each cause. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from fakevllm.overwatch.formatting import clean, format_number
from fakevllm.overwatch.snapshot import Snapshot

BRANCH_PREFIX = "branch_"
NOT_A_BRANCH_CAUSE = ("branch_rate", "branch_first", "branch_extends")
"""Metrics whose names begin with BRANCH_PREFIX, but which are not the number of branches with one
cause. They are the rate of branches, the number of first calls of conversations, and the number of
calls that extend an earlier call."""
CLIENT_PREFIX = "train_"
MAX_CLIENT_METRICS = 6
STEP_ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("update", (("loss", "loss"), ("kl", "kl"), ("grad", "grad_norm"), ("entropy", "entropy"))),
    ("mismatch", (("k3", "mismatch_k3"), ("ess", "ess"), ("fidelity", "token_fidelity"))),
    ("drift", (("rate", "drift_rate"), ("branches", "branch_rate"))),
    ("forest", (("rho", "rho"), ("speedup", "forest_speedup"))),
    ("trained", (("coverage", "sample_coverage"), ("ties", "tie_rate"))),
)
"""Rows with metrics of the last step. Each row has a name, and one pair (label, name of the metric)
for each of its metrics. A metric that was not measured is left out."""


def metrics_table(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for name, text in _rows(snapshot):
        table.add_row(name, Text(text))
    return table


def _rows(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    metrics = snapshot.metrics or {}
    if "reward_mean" in metrics:
        low = format_number(metrics.get("reward_min"))
        high = format_number(metrics.get("reward_max"))
        yield "reward", f"{format_number(metrics['reward_mean'])}, from {low} to {high}"
    if snapshot.evaluations:
        last = snapshot.evaluations[-1]
        low, high = format_number(last.low), format_number(last.high)
        episodes = f"{last.episodes} episode{'s' * (last.episodes != 1)}"
        rewards = f"{format_number(last.reward)}, from {low} to {high}"
        yield "evaluated", f"{rewards}, {episodes} at step {last.step}"
    if snapshot.speed is not None:
        speed = snapshot.speed
        sampled, trained = format_number(speed.sampled_per_s), format_number(speed.trained_per_s)
        step_s = format_number(speed.step_s)
        yield "tokens/s", f"{sampled} sampled, {trained} trained, a step in {step_s} s"
    for name, members in STEP_ROWS:
        parts = [
            f"{label} {format_number(metrics[metric])}"
            for label, metric in members
            if metric in metrics
        ]
        if parts:
            yield name, ", ".join(parts)
    if branches := _count_branches(snapshot.totals or {}):
        yield "branched", f"{branches} in the run"
    if client_metrics := _describe_client_metrics(metrics):
        yield "by clients", client_metrics


def _count_branches(totals: Mapping[str, float]) -> str:
    """Return a text with the number of branches by cause, the most frequent cause first. A branch
    is a model call that does not continue an earlier call of its session: its prompt does not begin
    with the prompt and the answer of any earlier call."""
    counts = {
        name.removeprefix(BRANCH_PREFIX): count
        for name, count in totals.items()
        if name.startswith(BRANCH_PREFIX) and name not in NOT_A_BRANCH_CAUSE
    }
    most_frequent_first = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{count:.0f} {clean(cause).replace('_', ' ')}" for cause, count in most_frequent_first
    )


def _describe_client_metrics(metrics: Mapping[str, float]) -> str:
    """Return a text with the metrics that clients logged with `log_metrics`. Return "" if clients
    logged no metrics."""
    names = [name for name in metrics if name.startswith(CLIENT_PREFIX)]
    parts = [
        f"{clean(name.removeprefix(CLIENT_PREFIX))} {format_number(metrics[name])}"
        for name in names[:MAX_CLIENT_METRICS]
    ]
    parts += [f"and {len(names) - MAX_CLIENT_METRICS} more"] * (len(names) > MAX_CLIENT_METRICS)
    return ", ".join(parts)
