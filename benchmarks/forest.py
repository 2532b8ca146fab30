"""Measure what sharing prefixes saves in a training step: time, peak memory, computed tokens.

    python -m benchmarks.forest [--rounds 5] [--ways naive,chains] [--longest 2048] [--write]
    python -m benchmarks.forest --whole [--write]       # only recorded sessions, with whole prompts

Several variants of the forward and backward pass are compared on synthetic and on recorded
sessions. A whole training step is compared with a training step of TRL. All variants train the same
model on the same calls. The variants take turns, so that all run under the same conditions. Their
gradients are compared before any time is measured. Time is CPU time of one thread. Ratios are
medians over rounds. Memory is the process's peak above the memory it held before (Linux only). If
recordings or TRL are missing, their part is skipped, and the output says why.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.forest_parts.cases import SHAPES, Shape
from benchmarks.forest_parts.measurement import Measurement, extrapolate_from_one_sibling, measure
from benchmarks.forest_parts.recorded_sessions import RECORDED, session_cases
from benchmarks.forest_parts.report import Report
from benchmarks.forest_parts.variants import OURS, VARIANTS, describe_sharing, make_model
from benchmarks.results import ROOT, conditions, markdown_table, replace_section

torch: Any = import_module("torch")

TITLE = "forest"
TITLE_WHOLE = "forest, whole prompts"
TRL_SHAPES = [Shape(256, 32, 8), Shape(1024, 32, 8), Shape(256, 32, 8, 6, 32)]
"""Shapes with long prompts and short answers."""
MAX_SESSION_ROUNDS = 2
"""Maximum number of rounds over recorded sessions, because one round of naive rows takes half a
minute."""


def main() -> int:
    """Run the benchmark. Return the exit code, which is 1 if a goal is missed."""
    args = _parse_arguments()
    text = conditions()
    torch.set_num_threads(1)
    report = run(args)
    console = Console(width=170)
    for section in report.sections():
        table = Table(*section.header)
        for row in section.rows:
            table.add_row(*row)
        console.print(section.explanation, table)
    goals = [f"{goal}: {'reached' if reached else 'MISSED'}" for goal, reached in report.goals()]
    notes = [*goals, *report.notes]
    console.print(*notes, sep="\n")
    if args.write:
        tables = [
            f"{section.explanation}\n\n{markdown_table(section.header, section.rows)}"
            for section in report.sections()
        ]
        note_list = "\n".join(f"- {note}" for note in notes)
        title = TITLE_WHOLE if args.whole else TITLE
        replace_section(title, "\n".join([text, *tables, note_list]))
    return 0 if all(reached for _, reached in report.goals()) else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds per variant")
    parser.add_argument(
        "--ways",
        default=",".join(VARIANTS),
        help="variants to measure; the first is the reference",
    )
    parser.add_argument(
        "--longest", type=int, default=2048, help="longest recorded prompt, in tokens"
    )
    parser.add_argument(
        "--whole", action="store_true", help="measure only recorded sessions, with whole prompts"
    )
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    args = parser.parse_args()
    if unknown := set(args.ways.split(",")) - VARIANTS.keys():
        names = ", ".join(sorted(unknown))
        parser.error(f"--ways: there is no {names}; choose from {', '.join(VARIANTS)}")
    return args


def run(args: argparse.Namespace) -> Report:
    """Take all measurements, and return them."""
    model = make_model()
    variants = {name: VARIANTS[name] for name in args.ways.split(",")}
    report = Report()
    if not RECORDED.exists():
        file = RECORDED.relative_to(ROOT.parent)
        report.notes.append(f"skipped recorded sessions: there is no file ../{file}")
    if args.whole:
        for case in session_cases(None) if RECORDED.exists() else ():
            naive, ours = VARIANTS["naive"], VARIANTS[OURS]
            measurement = extrapolate_from_one_sibling(model, case, naive, ours)
            report.extrapolated.append(measurement)
            _print_speeds(measurement)
            report.notes.append(f"{case.name}: {describe_sharing(case)}")
        return report
    for shape in SHAPES:
        measurement = measure(model, shape.create_case(), variants, args.rounds)
        report.shapes.append(measurement)
        _print_speeds(measurement)
    rounds = min(args.rounds, MAX_SESSION_ROUNDS)
    for case in session_cases(args.longest) if RECORDED.exists() else ():
        measurement = measure(model, case, variants, rounds)
        report.sessions.append(measurement)
        _print_speeds(measurement)
    _add_trl(report, model, args.rounds)
    return report


def _print_speeds(measurement: Measurement) -> None:
    """Print a line of progress, because the tables come minutes later."""
    speeds = [f"{name} {measurement.speed(name):.2f}x" for name in measurement.samples]
    print(f"{measurement.case.name}: {', '.join(speeds)}", file=sys.stderr, flush=True)


def _add_trl(report: Report, model: Any, num_rounds: int) -> None:
    """Add the comparison with TRL to the report, or a note that TRL is not installed."""
    try:
        report.trl_version = version("trl")
    except PackageNotFoundError:
        report.notes.append("skipped TRL: it is not installed; see benchmarks/README.md")
        return
    # Otherwise TRL's imports would contact the Hugging Face hub, which may be unreachable.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    trl: Any = import_module("benchmarks.forest_parts.trl_comparison")
    for shape in TRL_SHAPES:
        comparison = trl.compare(model, shape.create_case(), num_rounds)
        print(f"{shape.name}: {comparison.speed('ours'):.2f}x TRL", file=sys.stderr, flush=True)
        report.comparisons.append(comparison)


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.forest reads /proc and calls glibc, so it needs Linux.")
    sys.exit(main())
