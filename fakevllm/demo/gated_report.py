"""Print the results of a demo with the mode `gated`. These are the released version, the gain of
training, the gain of choosing the best answer, and the history of releases. If the demo has planted
steps (steps that train with the opposite rewards), their outcome is printed too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fakevllm.demo.gated_outcome import ArmChange, GatedOutcome, PlantedOutcome
from fakevllm.release.arm_gains import Gain
from fakevllm.release.evidence_text import difference
from fakevllm_adapters.protocol.releases import Decision


def show_gated(console: Console, outcome: GatedOutcome) -> None:
    console.print(_facts(outcome))
    console.print(_history(outcome.releases))
    if outcome.planted is not None:
        console.print(_planted(outcome.planted))
        for claim, holds in outcome.planted.claims.items():
            console.print(Text(f"{claim}: {'yes' if holds else 'NO'}", "green" if holds else "red"))


def _facts(outcome: GatedOutcome) -> Table:
    table = Table(title="The released version, and what was gained", show_header=False)
    right = f"[bold]{outcome.after_released:.1%}[/bold] right after training"
    table.add_row(f"version {outcome.released}", right)
    table.add_row("gain of the policy", gain_text(outcome.policy_gain, "pairs"))
    table.add_row("gain of choosing", gain_text(outcome.choice_gain, "sessions"))
    return table


def gain_text(gain: Gain | None, unit: str) -> str:
    """Return a gain as text, with its confidence interval and number of observations.

    >>> gain_text(Gain(0.25, 0.1, 0.4, 60), "sessions")
    '+0.250 (+0.100 to +0.400), from 60 sessions'
    """
    if gain is None:
        return "not known yet"
    interval = "" if gain.low is None else f" ({gain.low:+.3f} to {gain.high:+.3f})"
    return f"{gain.mean:+.3f}{interval}, from {gain.num} {unit}"


def _history(records: list[dict[str, Any]]) -> Table:
    table = Table(title="Releases")
    for name in ("decision", "version", "against", "difference", "pairs", "back to"):
        justify = "left" if name == "decision" else "right"
        table.add_column(name, justify=justify, no_wrap=name == "difference")
    for record in records:
        if record["decision"] != Decision.CANDIDATE:
            evidence = record["evidence"]
            values = (record["version"], evidence.get("released"))
            others = (evidence.get("pairs"), evidence.get("restored"))
            table.add_row(
                record["decision"],
                *map(_number, values),
                difference(evidence),
                *map(_number, others),
            )
    return table


def _planted(planted: PlantedOutcome) -> Table:
    first, last = planted.versions
    table = Table(
        title=f"Planted from step {planted.first_step} on: rewards with the opposite sign,\n"
        f"in the steps that began with version {first} to {last}",
        show_header=False,
    )
    for name, value in _planted_rows(planted):
        table.add_row(name, value)
    return table


def _planted_rows(planted: PlantedOutcome) -> Iterator[tuple[str, str]]:
    yield "rejected version", _number(planted.rejected)
    yield "training went back to version", _number(planted.restored)
    yield "sessions until then", _number(planted.sessions_until_return)
    yield "released arm's mean reward", _change(planted.released_arm)


def _change(change: ArmChange | None) -> str:
    if change is None:
        return "too few sessions"
    return (
        f"{change.before:.3f} before, {change.since:.3f} since:\n"
        f"{change.difference:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
    )


def _number(number: object) -> str:
    return "-" if number is None else str(number)
