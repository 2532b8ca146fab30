"""Sections of RESULTS.md: each benchmark has one, with the conditions of its last run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "RESULTS.md"


def conditions() -> str:
    """Return date, commit, machine and command of this run as Markdown."""
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit_name()}, {machine_name()} "
        f"(load {load:.1f} at the start), Python {platform.python_version()}:\n\n"
        f"    {command()}\n"
    )


def command() -> str:
    """Return the command line of this run, as a user would type it."""
    module = Path(sys.argv[0]).stem
    return " ".join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None
) -> None:
    """Print a table to the terminal."""
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


def replace_section(title: str, text: str, file: Path | None = None) -> None:
    """Replace or append the section `## title` of the file, by default RESULTS.md, and keep the
    other sections."""
    file = file or RESULTS
    old = file.read_text() if file.exists() else "# Results\n"
    section = f"## {title}\n\n{text.strip()}\n"
    pattern = rf"(?ms)^## {re.escape(title)}\n.*?(?=^## |\Z)"
    if re.search(pattern, old):
        new = re.sub(pattern, lambda _: section + "\n", old)
    else:
        new = f"{old.rstrip()}\n\n{section}"
    file.write_text(new.rstrip() + "\n")


def commit_name() -> str:
    """Return the current commit, with a mark if files have changed since."""
    output = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return output.stdout.strip() or "unknown"


def machine_name() -> str:
    """Return the processor and the number of cores."""
    return f"{cpu_name()}, {os.cpu_count()} cores"


def cpu_name() -> str:
    """Return the model of the processor."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1].strip() if model else platform.processor() or platform.machine()
