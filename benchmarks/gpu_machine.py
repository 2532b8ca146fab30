"""What `benchmarks.gpu_check` and `benchmarks.gpu_learn` have in common: their arguments, and the
JSON file and the table that they write."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.part_process import HEADER, PartResult
from benchmarks.results import cpu_name, markdown_table, print_table

TOTAL_S = 520.0
"""Seconds after which no part runs any more. Both commands have to end within nine minutes."""
CPU_NOTE = (
    "This ran on a CPU, with small models. It shows that the commands work, and nothing about a "
    "GPU."
)


def create_parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that both commands have."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--parts", help="names of the parts to run, by default all")
    return parser


def parse(parser: argparse.ArgumentParser, *, needs_tiny: bool = True) -> argparse.Namespace:
    """Parse the arguments, and create the folder for results. Exits with 2 if the device is not
    there. With `needs_tiny`, the command runs on a CPU only with tiny models."""
    args = parser.parse_args()
    if args.device == "cpu" and needs_tiny and not args.tiny:
        parser.error("--device cpu needs --tiny")
    if args.device == "cuda" and args.tiny:
        parser.error("--tiny needs --device cpu")
    if args.device == "cuda" and not has_cuda():
        print(f"{parser.prog}: torch finds no CUDA GPU. Use --device cpu --tiny.", file=sys.stderr)
        sys.exit(2)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    torch: Any = import_module("torch")
    return torch.cuda.is_available()


def chosen_parts(
    parser: argparse.ArgumentParser, args: argparse.Namespace, known: Sequence[str]
) -> list[str]:
    """Return the names of the parts to run."""
    chosen = args.parts.split(",") if args.parts else list(known)
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    return chosen


def describe_machine(device: str) -> dict[str, Any]:
    """Return the device and the versions of Python, torch and transformers. A package that is not
    installed has the version None."""
    versions: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "transformers"):
        versions[name] = version(name) if find_spec(name) else None
    on_cuda = device == "cuda" and has_cuda()
    name = import_module("torch").cuda.get_device_name() if on_cuda else cpu_name()
    return {"device": name, "is_cpu": device == "cpu", **versions}


def write_results(
    out: Path,
    name: str,
    machine: dict[str, Any],
    parts: Sequence[PartResult],
    figures: dict[str, Any] | None = None,
    text: str = "",
) -> None:
    """Write `NAME.json` and `NAME.md`, and print the table of the parts. `figures` are added to the
    JSON object, and `text` is a section in front of the table of the parts."""
    summary = {**machine, **(figures or {}), "parts": [asdict(part) for part in parts]}
    (out / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    rows = [part.cells for part in parts]
    title = f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}"
    print_table(HEADER, rows, title)
    note = f"{CPU_NOTE}\n\n" if machine["is_cpu"] else ""
    table = markdown_table(HEADER, [[cell.replace("|", "\\|") for cell in row] for row in rows])
    (out / f"{name}.md").write_text(f"{title}, Python {machine['python']}.\n\n{note}{text}{table}")
    if note:
        print(note.strip())


def exit_code(parts: Sequence[PartResult]) -> int:
    """Return 1 if a part failed, or if all parts were skipped."""
    states = {part.state for part in parts}
    return int("failed" in states or "passed" not in states)
