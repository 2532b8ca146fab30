"""`fakevllm demo` while its server, its engine and its proxy are killed: no group is lost or
trained twice, no app sees more than a broken connection, and the model learns as without.

    python -m benchmarks.demo_kills [--seeds 3] [--steps 300] [--each 5]

Every seed runs twice, once without kills, both with an app that asks beside the replay. SIGKILL at
seeded moments, `--each` of each. Exits with 1 where something does not hold. Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.demo_app import Asked, ask_beside
from benchmarks.demo_checks import check_demo
from benchmarks.kills import Killed, Planned, execute, plan
from benchmarks.mixed_checks import Finding
from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm.demo.probe import NUM_SAMPLES

Json = dict[str, Any]

TITLE = "demo_kills"
TOLERANCE = 0.05
"""Between the probes after a run with kills and one without. Near .98 one probe's standard error is
.01, that of a difference .014."""
DEMO_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Run:
    """A finished demo."""

    folder: Path
    """Of the demo: `--run-dir`."""
    seed: int
    kills: Sequence[Killed]
    asked: Sequence[Asked]
    outcome: Json
    """As `--json` writes it."""

    @property
    def after(self) -> float:
        return self.outcome["after"]

    def checks(self) -> list[Finding]:
        return check_demo(self.folder, self.kills, self.asked)


async def run_demo(
    folder: Path, seed: int, steps: int, kills: Sequence[Planned], timeout_s: float = DEMO_TIMEOUT_S
) -> Run:
    """In a new folder. Raises AssertionError with the demo's own words where it fails."""
    folder.mkdir(parents=True)
    run_dir, result, log = folder / "run", folder / "outcome.json", folder / "demo.log"
    command = [sys.executable, "-m", "fakevllm", "demo", "--steps", str(steps)]
    command += ["--seed", str(seed), "--run-dir", str(run_dir), "--json", str(result)]
    with log.open("wb") as out:
        demo = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL
        )
    asked: list[Asked] = []
    beside = asyncio.create_task(ask_beside(run_dir, seed, asked))

    def is_over() -> bool:
        # what dies behind its last answer is not started again
        return demo.returncode is not None or (run_dir / "probe_after.json").exists()

    killing = asyncio.create_task(asyncio.to_thread(execute, kills, run_dir, is_over))
    try:
        async with asyncio.timeout(timeout_s):
            code = await demo.wait()
    finally:
        if demo.returncode is None:
            demo.kill()
            await demo.wait()
        beside.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beside
        done = await killing
    assert code == 0, log.read_text()
    return Run(run_dir, seed, done, asked, json.loads(result.read_text()))


async def run_seed(folder: Path, seed: int, steps: int, each: int) -> tuple[Run, Run]:
    """Without kills, and with them."""
    kills = plan(random.Random(seed), steps, each)
    without = await run_demo(folder / f"without-{seed}", seed, steps, [])
    return without, await run_demo(folder / f"with-{seed}", seed, steps, kills)


def check_probes(without: Run, with_kills: Run) -> Finding:
    difference = with_kills.after - without.after
    error = math.hypot(*(standard_error(run.after) for run in (without, with_kills)))
    return Finding(
        f"the probe after the run is within {TOLERANCE} of that without",
        f"{without.after:.3f} and {with_kills.after:.3f}: {difference:+.3f}, of which its own "
        f"standard error is {error:.3f}",
        abs(difference) <= TOLERANCE + 1e-9,
    )


def standard_error(success: float) -> float:
    """Of one probe, by its number of samples.

    >>> round(standard_error(0.98), 4)
    0.0099
    """
    return math.sqrt(success * (1 - success) / NUM_SAMPLES)


def row_of(run: Run) -> dict[str, str]:
    victims = Counter(kill.victim for kill in run.kills)
    answered = [one for one in run.asked if one.ended is not None]
    groups = run.outcome["groups"]
    slowest = max((one.ended - one.began for one in answered if one.ended), default=0.0)
    return {
        "seed": str(run.seed),
        "kills": ", ".join(f"{count} {victim}" for victim, count in sorted(victims.items()))
        or "none",
        "before": f"{run.outcome['before']:.3f}",
        "after": f"{run.after:.3f}",
        "groups": ", ".join(f"{count} {state}" for state, count in sorted(groups.items())),
        "app's requests": str(len(answered)),
        "errors it saw": str(sum(len(one.errors) for one in answered)),
        "slowest s": f"{slowest:.0f}",
        "wall s": f"{run.outcome['wall_s']:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--each", type=int, default=5, help="kills of each of the three")
    parser.add_argument("--keep", type=Path, help="run in this new folder, and leave it")
    parser.add_argument("--write", action="store_true", help="Put the table into RESULTS.md.")
    options = parser.parse_args()
    told = conditions()
    runs: list[Run] = []
    findings: list[tuple[str, Finding]] = []
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as name:
        folder: Path = options.keep or Path(name)
        for seed in range(options.seeds):
            own = folder.absolute(), seed, options.steps, options.each
            without, with_kills = asyncio.run(run_seed(*own))
            runs += [without, with_kills]
            for run in (without, with_kills):
                label = f"{seed} with kills" if run.kills else f"{seed} without"
                findings += [(label, one) for one in run.checks()]
            findings.append((str(seed), check_probes(without, with_kills)))
    told += "\n" + show(runs, findings)
    if options.write:
        replace_section(TITLE, told)
    sys.exit(1 if any(one.is_good is False for _, one in findings) else 0)


def show(runs: Sequence[Run], findings: Sequence[tuple[str, Finding]]) -> str:
    """Both tables, as they go into RESULTS.md."""
    rows = [row_of(run) for run in runs]
    header = list(rows[0])
    figures = [list(row.values()) for row in rows]
    held = ["", "seed", "what must hold", "figures"]
    lines = [[one.mark, seed, one.what, one.told] for seed, one in findings]
    for columns, cells in ((header, figures), (held, lines)):
        table = Table(*columns)
        for line in cells:
            table.add_row(*line)
        Console(width=160).print(table)
    return f"{markdown_table(header, figures)}\n{markdown_table(held, lines)}"


if __name__ == "__main__":
    main()
