"""Measure a fixed set of figures, append them to the history, and report what became worse.

    python -m benchmarks.track [--quick] [--only proxy,decode] [--dry-run]

Each figure is a ratio to a floor that is measured in the same run. A figure whose engine is not
installed is skipped, and the reason is printed. A figure is printed as a regression if it is more
than 10 % worse than the median of the last five entries of this machine. The regression is printed
with two commits: this one, and the last one that was not worse. The drawing of the history
(docs/pictures/figures.svg) is written again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import ROOT, commit_name, machine_name
from benchmarks.track_parts.chart import draw
from benchmarks.track_parts.figures import MEASUREMENTS, Skipped
from benchmarks.track_parts.history import Entry, find_regressions, read_history

HISTORY = Path(__file__).parent / "history.jsonl"
CHART = ROOT / "docs/pictures/figures.svg"


def main() -> None:
    args = _parse_arguments()
    history = read_history(HISTORY.read_text()) if HISTORY.exists() else []
    if args.draw:
        CHART.write_text(draw(history))
        return
    started = time.monotonic()
    new = measure(args.only or _chosen(args.quick), is_quick=args.quick)
    for entry in new:
        better = f"times {entry.floor}; {entry.better} is better"
        print(f"{entry.figure}: {entry.ratio:.3g} ({better})")
    regressions = find_regressions(history, new)
    for regression in regressions:
        print(f"REGRESSION {regression}")
    print(f"{len(new)} figures, {len(regressions)} regressions, {time.monotonic() - started:.0f} s")
    if args.dry_run:
        return
    with HISTORY.open("a") as file:
        file.writelines(f"{entry.to_json()}\n" for entry in new)
    CHART.write_text(draw([*history, *new]))


def measure(names: Sequence[str], *, is_quick: bool) -> list[Entry]:
    """Make the measurements one after the other, and return their entries."""
    entries: list[Entry] = []
    commit, machine = commit_name(), machine_name()
    for name in names:
        measurement = MEASUREMENTS[name]
        try:
            ratios = measurement.measure(is_quick)
        except Skipped as reason:
            print(f"skipped {', '.join(measurement.floors)}: {reason}", flush=True)
            continue
        at = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        entries += [
            Entry(
                figure,
                round(ratio, 4),
                measurement.floors[figure],
                measurement.better,
                commit,
                machine,
                at,
                is_quick,
            )
            for figure, ratio in ratios.items()
        ]
    return entries


def _chosen(is_quick: bool) -> list[str]:
    return [name for name, one in MEASUREMENTS.items() if one.is_in_quick_part or not is_quick]


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - MEASUREMENTS.keys():
        choices = ", ".join(MEASUREMENTS)
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}: choose of {choices}")
    return names


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="only what .ci/run measures, in at most two minutes"
    )
    parser.add_argument("--only", type=_names, help="measurements, separated by commas")
    parser.add_argument("--dry-run", action="store_true", help="compare, and write no file")
    parser.add_argument("--draw", action="store_true", help="only draw the history again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
