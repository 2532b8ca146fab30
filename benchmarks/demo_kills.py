"""Run `fakevllm demo` while its server, its engine and its proxy are killed.

    python -m benchmarks.demo_kills [--seeds 3] [--steps 300] [--each 5]

The benchmark checks that no group is lost or trained twice, that an app sees at most a broken
connection, and that the model learns as well as without kills.

The demo runs twice with every seed: once with kills, and once without kills. In both runs, an app
sends requests while the demo replays its dataset. Each of the three processes gets `--each`
SIGKILLs at moments that the seed decides. The exit code is 1 if a check fails. The benchmark needs
Linux.
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

from benchmarks.demo_parts.checks import check_demo
from benchmarks.demo_parts.concurrent_app import AppRequest, run_app
from benchmarks.demo_parts.process_kills import (
    CompletedKill,
    PlannedKill,
    execute_kills,
    plan_kills,
)
from benchmarks.ledger_checks import Finding
from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm.demo.accuracy_probe import NUM_SAMPLES

Json = dict[str, Any]

TITLE = "demo_kills"
TOLERANCE = 0.05
"""Largest difference between the final probes of the run with kills and of the run without. If the
share of right answers is about .98, the standard error of one probe is .01, and the standard error
of the difference is .014."""
DEMO_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class DemoRun:
    """A finished demo."""

    folder: Path
    """The demo's run directory, `--run-dir`."""
    seed: int
    kills: Sequence[CompletedKill]
    requests: Sequence[AppRequest]
    """The requests of the app that ran at the same time as the demo."""
    outcome: Json
    """The content of the file that the demo writes for `--json`."""

    @property
    def after(self) -> float:
        """Share of right answers in the final probe."""
        return self.outcome["after"]

    def checks(self) -> list[Finding]:
        """Check the run's ledger, its journal and the app's requests."""
        return check_demo(self.folder, self.kills, self.requests)


async def run_demo(
    folder: Path,
    seed: int,
    steps: int,
    kills: Sequence[PlannedKill],
    timeout_s: float = DEMO_TIMEOUT_S,
) -> DemoRun:
    """Run the demo in a new folder, with an app beside it, and carry out the kills.

    Raises AssertionError with the demo's log if the demo fails. Raises TimeoutError if the demo
    does not end within `timeout_s` seconds.
    """
    folder.mkdir(parents=True)
    run_dir, result, log = folder / "run", folder / "outcome.json", folder / "demo.log"
    command = [sys.executable, "-m", "fakevllm", "demo", "--steps", str(steps)]
    command += ["--seed", str(seed), "--run-dir", str(run_dir), "--json", str(result)]
    with log.open("wb") as out:
        demo = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL
        )
    requests: list[AppRequest] = []
    app = asyncio.create_task(run_app(run_dir, seed, requests))

    def is_over() -> bool:
        # After its last probe the demo does not restart processes.
        return demo.returncode is not None or (run_dir / "probe_after.json").exists()

    killing = asyncio.create_task(asyncio.to_thread(execute_kills, kills, run_dir, is_over))
    try:
        async with asyncio.timeout(timeout_s):
            code = await demo.wait()
    finally:
        if demo.returncode is None:
            demo.kill()
            await demo.wait()
        app.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await app
        completed = await killing
    assert code == 0, log.read_text()
    return DemoRun(run_dir, seed, completed, requests, json.loads(result.read_text()))


async def run_seed(folder: Path, seed: int, steps: int, each: int) -> tuple[DemoRun, DemoRun]:
    """Run the demo once without kills and once with them, and return the runs in this order."""
    kills = plan_kills(random.Random(seed), steps, each)
    without = await run_demo(folder / f"without-{seed}", seed, steps, [])
    return without, await run_demo(folder / f"with-{seed}", seed, steps, kills)


def check_probes(without: DemoRun, with_kills: DemoRun) -> Finding:
    """Check that the final probes of both runs differ by at most TOLERANCE."""
    difference = with_kills.after - without.after
    error = math.hypot(*(standard_error(run.after) for run in (without, with_kills)))
    return Finding(
        f"the final probes with and without kills differ by at most {TOLERANCE}",
        f"{without.after:.3f} without and {with_kills.after:.3f} with kills: {difference:+.3f}, "
        f"standard error {error:.3f}",
        abs(difference) <= TOLERANCE + 1e-9,
    )


def standard_error(success: float) -> float:
    """Return the standard error of one probe with this share of right answers.

    >>> round(standard_error(0.98), 4)
    0.0099
    """
    return math.sqrt(success * (1 - success) / NUM_SAMPLES)


def run_cells(run: DemoRun) -> dict[str, str]:
    """Return the cells of the run's table row, by column."""
    victims = Counter(kill.victim for kill in run.kills)
    answered = [request for request in run.requests if request.answered_at is not None]
    groups = run.outcome["groups"]
    slowest = max(
        (one.answered_at - one.started_at for one in answered if one.answered_at), default=0.0
    )
    return {
        "seed": str(run.seed),
        "kills": ", ".join(f"{count} {victim}" for victim, count in sorted(victims.items()))
        or "none",
        "before": f"{run.outcome['before']:.3f}",
        "after": f"{run.after:.3f}",
        "groups": ", ".join(f"{count} {state}" for state, count in sorted(groups.items())),
        "app's requests": str(len(answered)),
        "app's errors": str(sum(len(request.errors) for request in answered)),
        "slowest s": f"{slowest:.0f}",
        "wall s": f"{run.outcome['wall_s']:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each demo")
    parser.add_argument("--each", type=int, default=5, help="number of kills of each process")
    parser.add_argument("--keep", type=Path, help="run in this new folder, and keep it")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    options = parser.parse_args()
    text = conditions()
    runs: list[DemoRun] = []
    findings: list[tuple[str, Finding]] = []
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as name:
        folder = (options.keep or Path(name)).absolute()
        for seed in range(options.seeds):
            without, with_kills = asyncio.run(run_seed(folder, seed, options.steps, options.each))
            runs += [without, with_kills]
            for run in (without, with_kills):
                label = f"{seed} with kills" if run.kills else f"{seed} without"
                findings += [(label, finding) for finding in run.checks()]
            findings.append((str(seed), check_probes(without, with_kills)))
    text += "\n" + print_tables(runs, findings)
    if options.write:
        replace_section(TITLE, text)
    sys.exit(1 if any(finding.holds is False for _, finding in findings) else 0)


def print_tables(runs: Sequence[DemoRun], findings: Sequence[tuple[str, Finding]]) -> str:
    """Print the tables of runs and of checks, and return both as Markdown for RESULTS.md."""
    rows = [run_cells(run) for run in runs]
    run_header = list(rows[0])
    run_rows = [list(row.values()) for row in rows]
    check_header = ["", "seed", "what must hold", "figures"]
    check_rows = [[one.mark, seed, one.claim, one.figures] for seed, one in findings]
    for columns, cells in ((run_header, run_rows), (check_header, check_rows)):
        table = Table(*columns)
        for line in cells:
            table.add_row(*line)
        Console(width=160).print(table)
    run_table = markdown_table(run_header, run_rows)
    return f"{run_table}\n{markdown_table(check_header, check_rows)}"


if __name__ == "__main__":
    main()
