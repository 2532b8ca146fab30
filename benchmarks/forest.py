"""What sharing prefixes saves a training step: time, peak memory and tokens of forward and
backward, by traffic and by way through the model; over recorded sessions too, and beside TRL.

    python -m benchmarks.forest [--rounds 5] [--ways naive,chains] [--longest 2048] [--write]
    python -m benchmarks.forest --whole [--write]       # recorded prompts as they are, and no more

All ways train the same calls of the same model, in turns, so that they see the same machine; the
gradients are compared before any time is taken. Time is the CPU's, of one thread; ratios are
medians over rounds, of what ran next to each other. Memory is the process's peak above what it held
before (Linux only). Where recordings or TRL are not there, that part is skipped, with the reason.
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
from benchmarks.forest_parts.measurement import Measured, measure, reckoned_from_one_sibling
from benchmarks.forest_parts.recorded_sessions import RECORDED, session_cases
from benchmarks.forest_parts.report import Found
from benchmarks.forest_parts.variants import OURS, WAYS, budgets_matter, make_model
from benchmarks.results import ROOT, conditions, markdown_table, replace_section

torch: Any = import_module("torch")

TITLE = "forest"
TITLE_WHOLE = "forest, whole prompts"
TRL_SHAPES = [Shape(256, 32, 8), Shape(1024, 32, 8), Shape(256, 32, 8, 6, 32)]
"""Prompt-heavy ones."""
BESIDE = ROOT.parent
SESSION_ROUNDS = 2
"""At most: naive rows take half a minute each."""


def main() -> int:
    """The exit code: 1 where a goal is missed."""
    args = _arguments()
    told = conditions()
    torch.set_num_threads(1)
    found = run(args)
    console = Console(width=170)
    for section in found.sections():
        table = Table(*section.header)
        for row in section.rows:
            table.add_row(*row)
        console.print(section.told, table)
    goals = [f"{what}: {'reached' if reached else 'MISSED'}" for what, reached in found.goals()]
    notes = [*goals, *found.notes]
    console.print(*notes, sep="\n")
    if args.write:
        tables = [
            f"{one.told}\n\n{markdown_table(one.header, one.rows)}" for one in found.sections()
        ]
        listed = "\n".join(f"- {note}" for note in notes)
        title = TITLE_WHOLE if args.whole else TITLE
        replace_section(title, "\n".join([told, *tables, listed]))
    return 0 if all(reached for _, reached in found.goals()) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS), help="The first is the yardstick.")
    parser.add_argument("--longest", type=int, default=2048, help="Tokens of a recorded prompt.")
    parser.add_argument(
        "--whole", action="store_true", help="Recorded prompts as they are, and nothing else."
    )
    parser.add_argument("--write", action="store_true", help="Put the tables into RESULTS.md.")
    args = parser.parse_args()
    if unknown := set(args.ways.split(",")) - WAYS.keys():
        parser.error(f"no way {', '.join(sorted(unknown))}: choose from {', '.join(WAYS)}")
    return args


def run(args: argparse.Namespace) -> Found:
    model = make_model()
    ways = {name: WAYS[name] for name in args.ways.split(",")}
    found = Found()
    if not RECORDED.exists():
        found.notes.append(
            f"skipped recorded sessions: there is no ../{RECORDED.relative_to(BESIDE)}"
        )
    if args.whole:
        for case in session_cases(None) if RECORDED.exists() else ():
            measured = reckoned_from_one_sibling(model, case, WAYS["naive"], WAYS[OURS])
            found.reckoned.append(_told(measured))
            found.notes.append(f"{case.name}: {budgets_matter(case)}")
        return found
    for shape in SHAPES:
        found.shapes.append(_told(measure(model, shape.case(), ways, args.rounds)))
    rounds = min(args.rounds, SESSION_ROUNDS)
    for case in session_cases(args.longest) if RECORDED.exists() else ():
        found.sessions.append(_told(measure(model, case, ways, rounds)))
    _add_trl(found, model, args.rounds)
    return found


def _told(measured: Measured) -> Measured:
    """It takes minutes until the tables come."""
    speeds = [f"{name} {measured.speed(name):.2f}x" for name in measured.samples]
    print(f"{measured.case.name}: {', '.join(speeds)}", file=sys.stderr, flush=True)
    return measured


def _add_trl(found: Found, model: Any, num_rounds: int) -> None:
    try:
        found.trl = version("trl")
    except PackageNotFoundError:
        found.notes.append("skipped TRL: not installed, see benchmarks/README.md")
        return
    # What it imports would ask a hub that may not be there.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    trl: Any = import_module("benchmarks.forest_parts.trl_comparison")
    for shape in TRL_SHAPES:
        peer = trl.compare(model, shape.case(), num_rounds)
        print(f"{shape.name}: {peer.speed('ours'):.2f}x TRL", file=sys.stderr, flush=True)
        found.peers.append(peer)


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.forest reads /proc and asks glibc: it runs on Linux only.")
    sys.exit(main())
