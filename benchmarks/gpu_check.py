"""Check and measure the embedded engine on a CUDA GPU.

    .ci/gpu check --out gpu_check                          # needs CUDA
    .ci/gpu check --out gpu_check --device cpu --tiny      # the same commands, over tiny models

Parts that are not timed run at the same time: the CUDA tests, the demo, its control with shuffled
rewards, and a learning curve in float32. Then the timed parts run one after another. A part that
fails does not stop the other parts. A part that takes longer than TIMEOUT_S is killed. The output
of each part is written to `OUT/NAME.log`, and the summary to `OUT/gpu_check.json`. The exit code is
1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.results import print_table

PYTEST = "-m pytest -q -n 0 -p no:cacheprovider -o filterwarnings=default -m gpu tests/swarm_server"
CUDA_PARTS = {
    "tests": PYTEST,
    "demo": "-m fakevllm.cli.main demo --run-dir {out}/demo --json {out}/demo.json",
    "shuffled": "-m fakevllm.cli.main demo --control shuffled --steps 40 --run-dir {out}/shuffled"
    " --json {out}/shuffled.json",
    "float32": "-m swarm_server.backends.embedded.learning_curve --dtype float32 --steps 60",
}
TIMED_CUDA_PARTS = {
    "forest": "-m benchmarks.forest_gpu --models 0.5B --rounds 3",
    "decode": "-m benchmarks.embedded_decode --device cuda --models demo,0.5B --rounds 3",
}
TINY_PARTS = {
    "tests": PYTEST + " --collect-only",
    "demo": "-m fakevllm.cli.main demo --steps 3 --run-dir {out}/demo --json {out}/demo.json",
    "float32": "-m swarm_server.backends.embedded.learning_curve --dtype float32 --steps 3",
}
TIMED_TINY_PARTS = {
    "forest": "-m benchmarks.forest_gpu --device cpu --rounds 1",
    "decode": "-m benchmarks.embedded_decode --models demo --batches 1 --rounds 1",
}
TIMEOUT_S = 240.0
"""Seconds after which a part is killed."""
NUM_LAST_LINES = 12
"""Number of lines of a part's output that are printed and stored in the summary."""


@dataclass(frozen=True, slots=True)
class PartResult:
    name: str
    command: str
    exit_code: int
    """-9 if the part took too long."""
    seconds: float
    last_lines: list[str]


class RunningPart:
    """A part that runs in a process of its own."""

    def __init__(self, name: str, arguments: str, out: Path) -> None:
        self._name = name
        self._arguments = arguments.format(out=out).split()
        self._log = out / f"{name}.log"
        self._started = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._arguments], stdout=log, stderr=subprocess.STDOUT
            )

    def finish(self) -> PartResult:
        """Wait until the part ends, and return its result. A part that takes longer than TIMEOUT_S
        is killed."""
        left_s = max(0.0, self._started + TIMEOUT_S - time.monotonic())
        try:
            exit_code = self._process.wait(left_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            exit_code = self._process.wait()
        seconds = time.monotonic() - self._started
        lines = self._log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        print(f"--- {self._name}: exit code {exit_code}, {seconds:.0f} s", *lines, sep="\n")
        command = " ".join(["python", *self._arguments])
        return PartResult(self._name, command, exit_code, round(seconds, 1), lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder for results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--parts", help="names of the parts to run, by default all")
    args = parser.parse_args()
    torch: Any = import_module("torch")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA GPU. Use --device cpu --tiny.", file=sys.stderr)
        return 2
    if (args.device == "cpu") != args.tiny:
        parser.error("--device cpu and --tiny go together")
    args.out.mkdir(parents=True, exist_ok=True)
    together, timed = (
        (TINY_PARTS, TIMED_TINY_PARTS) if args.tiny else (CUDA_PARTS, TIMED_CUDA_PARTS)
    )
    chosen = args.parts.split(",") if args.parts else [*together, *timed]
    if unknown := set(chosen) - {*together, *timed}:
        known = ", ".join([*together, *timed])
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: choose from {known}")
    running = [
        RunningPart(name, arguments, args.out)
        for name, arguments in together.items()
        if name in chosen
    ]
    results = [part.finish() for part in running]
    for name, arguments in timed.items():
        if name in chosen:
            results.append(RunningPart(name, arguments, args.out).finish())
    _report(args, torch, results)
    return 1 if any(result.exit_code for result in results) else 0


def _report(args: argparse.Namespace, torch: Any, results: list[PartResult]) -> None:
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": import_module("transformers").__version__,
    }
    summary = {"device": device, **versions, "parts": [asdict(result) for result in results]}
    (args.out / "gpu_check.json").write_text(json.dumps(summary, indent=1))
    rows = [[result.name, str(result.exit_code), f"{result.seconds:.0f} s"] for result in results]
    print_table(["part", "exit code", "time"], rows, f"{device}, torch {torch.__version__}")


if __name__ == "__main__":
    sys.exit(main())
