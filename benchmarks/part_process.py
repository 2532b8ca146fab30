"""Run the parts of a check of a GPU machine as processes with hard time limits.

A part that fails, or that takes too long, does not stop the other parts. A part whose packages are
missing is skipped, with the reason.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

LEAST_PART_S = 5.0
"""Seconds that must be left for a part to be started."""
NUM_LAST_LINES = 12
"""Number of lines of a part's output that are printed and stored in the summary."""
ENGINE = ("torch", "transformers", "safetensors", "peft", "fastapi", "uvicorn", "aiohttp", "openai")
"""Modules that a part with server, proxy and embedded engine needs."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: str
    """Arguments of Python, separated by spaces. `{out}` is the folder for results."""
    modules: Sequence[str] = ENGINE
    """Modules without which the part is skipped."""
    limit_s: float = 240.0
    """Seconds after which the part is killed."""

    @property
    def missing(self) -> str | None:
        """The reason why the part cannot run on this machine; None if it can."""
        names = [name for name in self.modules if find_spec(name) is None]
        return f"not installed: {', '.join(names)}" if names else None


@dataclass(frozen=True, slots=True)
class PartResult:
    name: str
    command: str
    state: Literal["passed", "failed", "skipped"]
    reason: str
    """Reason why the part failed or was skipped; empty if it passed."""
    exit_code: int | None
    """None if the part was skipped, and -9 if it took too long."""
    seconds: float
    last_lines: list[str]

    @property
    def cells(self) -> list[str]:
        seconds = "" if self.state == "skipped" else f"{self.seconds:.0f} s"
        return [self.name, self.state, seconds, self.reason]


HEADER = ["part", "state", "time", "reason"]


class RunningPart:
    """A part that runs in a process of its own."""

    def __init__(self, part: Part, out: Path, left_s: float) -> None:
        """Start the part. It is killed after `left_s` seconds, or after the part's own limit."""
        self._part = part
        self._arguments = part.command.format(out=out).split()
        self._log = out / f"{part.name}.log"
        self._limit_s = min(part.limit_s, left_s)
        self._started = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._arguments], stdout=log, stderr=subprocess.STDOUT
            )

    def finish(self) -> PartResult:
        """Wait until the part ends, and return its result. A part that takes too long is killed."""
        left_s = max(0.0, self._started + self._limit_s - time.monotonic())
        reason = ""
        try:
            exit_code = self._process.wait(left_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            exit_code = self._process.wait()
            reason = f"not finished within {self._limit_s:.0f} s"
        seconds = time.monotonic() - self._started
        lines = self._log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        if exit_code and not reason:
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            reason = f"exit code {exit_code}: {last.strip()}"
        head = f"--- {self._part.name}: exit code {exit_code}, {seconds:.0f} s"
        print("\n".join([head, *lines]))
        return PartResult(
            self._part.name,
            " ".join(["python", *self._arguments]),
            "failed" if exit_code else "passed",
            reason,
            exit_code,
            round(seconds, 1),
            lines,
        )


def skipped(part: Part, reason: str) -> PartResult:
    """Return the result of a part that was not started."""
    print(f"--- {part.name}: skipped, {reason}")
    return PartResult(part.name, part.command, "skipped", reason, None, 0.0, [])


def run_together(parts: Sequence[Part], out: Path, deadline: float) -> list[PartResult]:
    """Run parts at the same time, and return their results. No part runs after `deadline`, a time
    of time.monotonic()."""
    left_s = deadline - time.monotonic()
    reasons = {
        part.name: f"{max(0.0, left_s):.0f} s are left" if left_s < LEAST_PART_S else part.missing
        for part in parts
    }
    running = [RunningPart(part, out, left_s) for part in parts if reasons[part.name] is None]
    # Each part has a thread that waits for it, so that its time does not depend on other parts.
    with ThreadPoolExecutor(max(1, len(running))) as pool:
        finished = {result.name: result for result in pool.map(RunningPart.finish, running)}
    return [finished.get(part.name) or skipped(part, reasons[part.name] or "") for part in parts]
