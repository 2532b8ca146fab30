"""Check and measure the embedded engine on a CUDA GPU.

    .ci/gpu check --out gpu_check                          # needs CUDA
    .ci/gpu check --out gpu_check --device cpu --tiny      # the same commands, over tiny models

Parts that are not timed run at the same time: the CUDA tests, the demo, its control with shuffled
rewards, and a learning curve in float32. Then the timed parts run one after another. A part that
fails does not stop the other parts. A part that takes longer than its limit is killed, and a part
whose packages are missing is skipped. The output of each part is written to `OUT/NAME.log`, and the
summary to `OUT/check.json` and `OUT/check.md`. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import sys
import time

from benchmarks import gpu_machine
from benchmarks.part_process import ENGINE, Part, PartResult, run_together

TESTS = (*ENGINE, "hypothesis", "pytest", "pytest_asyncio", "pytest_timeout", "xdist")
PYTEST = "-m pytest -q -n 0 -p no:cacheprovider -o filterwarnings=default -m gpu tests/swarm_server"
CURVE = "-m swarm_server.backends.embedded.learning_curve --dtype float32"
DEMO = "-m fakevllm.cli.main demo"
CUDA_PARTS = (
    Part("tests", PYTEST, TESTS),
    Part("demo", f"{DEMO} --run-dir {{out}}/demo --json {{out}}/demo.json"),
    Part(
        "shuffled",
        f"{DEMO} --control shuffled --steps 40 --run-dir {{out}}/shuffled"
        " --json {out}/shuffled.json",
    ),
    Part("float32", f"{CURVE} --steps 60"),
)
TIMED_CUDA_PARTS = (
    Part("forest", "-m benchmarks.forest_gpu --models 0.5B --rounds 3", limit_s=200),
    Part("decode", "-m benchmarks.embedded_decode --device cuda --models demo,0.5B --rounds 3"),
)
TINY_PARTS = (
    Part("tests", f"{PYTEST} --collect-only", TESTS),
    Part("demo", f"{DEMO} --steps 3 --run-dir {{out}}/demo --json {{out}}/demo.json"),
    Part("float32", f"{CURVE} --steps 3"),
)
TIMED_TINY_PARTS = (
    Part("forest", "-m benchmarks.forest_gpu --device cpu --rounds 1"),
    Part("decode", "-m benchmarks.embedded_decode --models demo --batches 1 --rounds 1"),
)


def main() -> int:
    parser = gpu_machine.create_parser(__doc__, "gpu_check")
    args = gpu_machine.parse(parser)
    together, timed = (
        (TINY_PARTS, TIMED_TINY_PARTS) if args.tiny else (CUDA_PARTS, TIMED_CUDA_PARTS)
    )
    chosen = gpu_machine.chosen_parts(parser, args, [part.name for part in (*together, *timed)])
    deadline = time.monotonic() + gpu_machine.TOTAL_S
    results: list[PartResult] = []
    for parts in (together, *([part] for part in timed)):
        selected = [part for part in parts if part.name in chosen]
        results += run_together(selected, args.out, deadline)
    gpu_machine.write_results(args.out, "check", gpu_machine.describe_machine(args.device), results)
    return gpu_machine.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
