"""The page of a run's files names every file that a run writes."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from docs.reference_pages.run_files import RUN_FILES


def test_every_file_of_a_demo_is_on_the_page_of_run_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fakevllm", "demo", "--backend", "fake", "--steps", "2"]
    subprocess.run([*command, "--run-dir", str(tmp_path)], timeout=250, check=True)
    found = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*")}
    patterns = [one.pattern for files in RUN_FILES.values() for one in files]
    unknown = {
        name
        for name in found
        if not any(
            fnmatchcase(name, pattern)
            or fnmatchcase(name, f"{pattern}-*")  # beside a database
            or pattern.startswith(f"{name}/")  # a folder above a file
            or fnmatchcase(f"{name}/x", pattern)
            for pattern in patterns
        )
    }
    assert {"journal.sqlite", "ledger.sqlite"} <= found
    assert unknown == set()
