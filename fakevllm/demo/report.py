"""Print the demo's result: a table, the learning curve, sample answers, and commands to try
next."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fakevllm.demo import plot
from fakevllm.demo.accuracy_probe import Probe
from fakevllm.demo.gated_report import show_gated
from fakevllm.demo.run_summary import Outcome
from fakevllm.runtime.local_engines import EngineChoice

SHOWN_SAMPLES = 5


def show(console: Console, outcome: Outcome, before: Probe, after: Probe, ledger: Path) -> None:
    console.print(_summary(outcome))
    if outcome.gated is not None:
        show_gated(console, outcome.gated)
    curve_file = Path(outcome.run_dir) / "curve.png"
    if (curve := plot.in_terminal(outcome, console.width)) is not None:
        console.print(Text.from_ansi(curve), no_wrap=True, crop=False)
    if plot.as_png(outcome, curve_file):
        console.print(f"Curve: {curve_file}", markup=False, soft_wrap=True)
    console.print(_samples(before, after))
    # Lines are not wrapped, so that a copied path or command contains no line break.
    console.print(
        f"Every group, with its siblings, rewards and tokens: {ledger}\n"
        f"The same as web pages: fakevllm console --run-dir {outcome.run_dir}",
        markup=False,
        soft_wrap=True,
    )
    console.print(_next_steps(outcome), markup=False, soft_wrap=True)


def _summary(outcome: Outcome) -> Table:
    engines = EngineChoice(outcome.rollout, outcome.trainer).title
    table = Table(
        title=f"Right answers at temperature 1, {outcome.steps} steps, control: {outcome.control}\n"
        f"{engines}"
    )
    for column in ("before", "after", "requests", "groups without signal", "wall time"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{outcome.before:.1%}",
        f"[bold]{outcome.after:.1%}[/bold]",
        str(outcome.requests),
        f"{outcome.groups_without_signal} of {outcome.groups_in_steps}",
        f"{outcome.wall_s:.0f} s",
    )
    return table


def _samples(before: Probe, after: Probe) -> Table:
    table = Table(title="The same questions, before and after")
    for column in ("question", "before", "after"):
        table.add_column(column)
    pairs = zip(before.samples[:SHOWN_SAMPLES], after.samples[:SHOWN_SAMPLES], strict=True)
    for (question, old, was_right), (_, new, is_right) in pairs:
        table.add_row(Text(question), _coloured(old, was_right), _coloured(new, is_right))
    return table


def _coloured(answer: str, right: bool) -> Text:
    return Text(answer or "(nothing)", "green" if right else "red")


def _next_steps(outcome: Outcome) -> str:
    engines = " ".join(["", *EngineChoice(outcome.rollout, outcome.trainer).flags])
    return (
        "\nNext, with your own app:\n"
        "  1. fakevllm init my_project (writes the settings, a hook and its tests)\n"
        "  2. cd my_project && fakevllm up (starts everything, and prints a link to web pages)\n"
        "  3. start your app with OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any\n"
        "README.md explains these steps. A real model needs a lower learning rate, for example "
        "lr = 1e-6 under [job] in fakevllm.toml.\n"
        "(the commands are in the bin folder of the virtual environment of this demo)\n"
        "To continue this run: "
        f"fakevllm demo --run-dir {outcome.run_dir} --steps {outcome.steps * 2}{engines}"
        + ("" if outcome.control == "none" else f" --control {outcome.control}")
        + (" --lockstep" if outcome.lockstep else "")
        + (f" --async-steps {outcome.async_steps}" if outcome.async_steps else "")
        + ("" if outcome.gated is None else " --gated")
    )
