"""RESULTS.md: one section a benchmark, replaced by each run of it; and what the figures hang on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "RESULTS.md"


def conditions() -> str:
    """Machine, date, commit and command, as one paragraph."""
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, commit {_commit()}, {_cpu()}, {os.cpu_count()} cores "
        f"(load {load:.1f} at the start), Python {platform.python_version()}:\n\n"
        f"    {command()}\n"
    )


def command() -> str:
    module = Path(sys.argv[0]).stem
    return " ".join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def replace_section(title: str, text: str, file: Path = RESULTS) -> None:
    """Puts `text` under `## title`; other sections stay as they are."""
    old = file.read_text() if file.exists() else "# Results\n"
    section = f"## {title}\n\n{text.strip()}\n"
    pattern = rf"(?ms)^## {re.escape(title)}\n.*?(?=^## |\Z)"
    if re.search(pattern, old):
        new = re.sub(pattern, lambda _: section + "\n", old)
    else:
        new = f"{old.rstrip()}\n\n{section}"
    file.write_text(new.rstrip() + "\n")


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip() or "unknown"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
