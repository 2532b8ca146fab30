"""Draw the demo's learning curve (mean reward per training step) in the terminal and as a PNG file.

Drawing in the terminal requires the package plotext, and the PNG file requires matplotlib. If one
of the packages is missing, its drawing is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fakevllm.demo.run_summary import Outcome

WIDEST = 90
HEIGHT = 16


def in_terminal(outcome: Outcome, width: int) -> str | None:
    """Return the learning curve drawn as text, at most `width` characters wide. Return None if
    plotext is not installed."""
    plotext = _module("plotext")
    if plotext is None:
        return None
    plotext.clf()
    plotext.theme("clear")
    plotext.plot_size(min(width, WIDEST), HEIGHT)
    plotext.ylim(0, 1)
    steps = list(range(1, len(outcome.policy_mean) + 1))
    for name, values in (
        ("policy mean", outcome.policy_mean),
        ("returned best", outcome.returned_best),
    ):
        curve = points_of(values)
        plotext.plot(curve.steps, smoothed(curve.values), label=name)
    plotext.xticks(steps[:: max(1, len(steps) // 6)])
    plotext.xlabel("step")
    return plotext.build()


def as_png(outcome: Outcome, file: Path) -> bool:
    """Draw the learning curve into the PNG file `file`. Return True if the file was written, and
    False if matplotlib is not installed."""
    matplotlib = _module("matplotlib")
    if matplotlib is None:
        return False
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, values, colour in (
        ("policy mean", outcome.policy_mean, "tab:green"),
        ("returned best", outcome.returned_best, "tab:blue"),
    ):
        curve = points_of(values)
        axes.plot(curve.steps, curve.values, color=colour, alpha=0.25)
        axes.plot(curve.steps, smoothed(curve.values), color=colour, label=name)
    axes.axhline(outcome.before, color="grey", linestyle=":", label="probe before")
    axes.axhline(outcome.after, color="black", linestyle="--", label="probe after")
    title = f"control: {outcome.control}"
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True


class Curve(NamedTuple):
    steps: list[int]
    values: list[float]


def points_of(values: Sequence[float | None]) -> Curve:
    """Return the points of a curve: the values that are not None, and the numbers of their steps.
    The first step has the number 1.

    >>> points_of([0.5, None, 1.0])
    Curve(steps=[1, 3], values=[0.5, 1.0])
    """
    points = [(step, value) for step, value in enumerate(values, 1) if value is not None]
    return Curve([step for step, _ in points], [value for _, value in points])


def smoothed(values: Sequence[float], window: int = 5) -> list[float]:
    """Return the moving average of the values. Each value is replaced by the mean of itself and up
    to `window` - 1 values before it."""
    windows = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in windows]


def _module(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
