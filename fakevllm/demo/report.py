"""What the demo leaves behind: a table, a curve in the terminal and as PNG, sample answers, the
next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fakevllm.demo.probe import Probe

SHOWN_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a finished run, as `--json` writes them."""

    before: float
    after: float
    policy_mean: list[float]
    """[s]: mean reward of all scored siblings of all groups ended in step s + 1, ties included."""
    returned_best: list[float]
    steps: int
    requests: int
    wall_s: float
    seed: int
    control: str
    groups: dict[str, int]
    """By state in the ledger."""
    groups_without_signal: int
    restarts: int
    run_dir: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def show(console: Console, outcome: Outcome, before: Probe, after: Probe, ledger: Path) -> None:
    console.print(_summary(outcome))
    curve_file = Path(outcome.run_dir) / "curve.png"
    _plot_in_terminal(console, outcome)
    if _plot_png(outcome, curve_file):
        console.print(f"Curve: {curve_file}")
    console.print(_samples(before, after))
    console.print(f"Every group, with its siblings, rewards and tokens: {ledger}")
    console.print(_next_steps(outcome))


def _summary(outcome: Outcome) -> Table:
    table = Table(
        title=f"Right answers at temperature 1, {outcome.steps} steps, control: {outcome.control}"
    )
    for column in ("before", "after", "requests", "groups without signal", "wall time"):
        table.add_column(column, justify="right")
    total = sum(outcome.groups.values())
    table.add_row(
        f"{outcome.before:.1%}",
        f"[bold]{outcome.after:.1%}[/bold]",
        str(outcome.requests),
        f"{outcome.groups_without_signal} of {total}",
        f"{outcome.wall_s:.0f} s",
    )
    return table


def _samples(before: Probe, after: Probe) -> Table:
    table = Table(title="The same questions, before and after")
    for column in ("question", "before", "after"):
        table.add_column(column)
    pairs = zip(before.samples[:SHOWN_SAMPLES], after.samples[:SHOWN_SAMPLES], strict=True)
    for (question, old, was_right), (_, new, is_right) in pairs:
        table.add_row(question, _marked(old, was_right), _marked(new, is_right))
    return table


def _marked(answer: str, right: bool) -> str:
    return f"[{'green' if right else 'red'}]{answer or '(nothing)'}[/]"


def _plot_in_terminal(console: Console, outcome: Outcome) -> None:
    try:
        import plotext
    except ImportError:
        return
    plotext.clf()
    plotext.theme("clear")
    plotext.plot_size(min(console.width, 90), 16)
    plotext.ylim(0, 1)
    steps = list(range(1, len(outcome.policy_mean) + 1))
    plotext.plot(steps, smoothed(outcome.policy_mean), label="policy mean")
    plotext.plot(steps, smoothed(outcome.returned_best), label="returned best")
    plotext.xlabel("step")
    console.print(plotext.build(), markup=False, highlight=False)


def _plot_png(outcome: Outcome, file: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(outcome.policy_mean) + 1)
    for name, values, colour in (
        ("policy mean", outcome.policy_mean, "tab:green"),
        ("returned best", outcome.returned_best, "tab:blue"),
    ):
        axes.plot(steps, values, color=colour, alpha=0.25)
        axes.plot(steps, smoothed(values), color=colour, label=name)
    axes.axhline(outcome.before, color="grey", linestyle=":", label="probe before")
    axes.axhline(outcome.after, color="black", linestyle="--", label="probe after")
    axes.set(
        xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title=f"control: {outcome.control}"
    )
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True


def smoothed(values: Sequence[float], window: int = 5) -> list[float]:
    """Running mean over the last `window` values."""
    cut = [values[max(0, at + 1 - window) : at + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in cut]


def _next_steps(outcome: Outcome) -> str:
    return (
        "\nNext, with your own app:\n"
        "  1. fakevllm-server start --model YOUR_MODEL_FOLDER\n"
        "  2. put your two hook files into a folder (reward_hooks/ has some to copy), try them: "
        "fakevllm check-hook FOLDER\n"
        "  3. fakevllm serve --hooks FOLDER --n 4\n"
        "  4. start your app with OPENAI_BASE_URL=http://127.0.0.1:8000/v1\n"
        "Go on with this run: "
        f"fakevllm demo --run-dir {outcome.run_dir} --steps {outcome.steps * 2}"
    )
