"""Measure how long new weights take from the embedded trainer to vLLM, with each weight transport.

    python -m benchmarks.weight_transport [--rounds 5] [--write]

One trainer and one vLLM are started, with a Qwen3 of 50 million random weights in float32 (about
200 MB). In each round, both transports publish the same weights, so that both have the same
conditions. After each publish, vLLM's log-probabilities of the known prompt must be the trainer's.

On a machine without a GPU, the transport `vllm` uses the engine `fakevllm_json`. vLLM needs the
environment of server/cpu/make_environment.sh.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from benchmarks.results import conditions, markdown_table, print_table, replace_section
from benchmarks.rollout import MAX_MODEL_LEN, make_model
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses, weights_folder
from fakevllm_server.backends.process.weight_transports import WeightsFolder
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.training.weight_probe import WeightProbe
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.engine_spec import EngineSpec

TITLE = "weight transport"
GB = 10**9
SIZES = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 10}
FOLDER, VLLM = "folder", "vllm"
NO_GPU = (
    "The transport `vllm` sends base64 in JSON here (`fakevllm_json`), because there is no GPU. "
    "Its figures say nothing about CUDA IPC and NCCL, which have not been measured."
)


@dataclass(slots=True)
class Timing:
    """Seconds of each publish by one transport."""

    total_s: list[float] = field(default_factory=list[float])
    waiting_s: list[float] = field(default_factory=list[float])
    """Seconds in which calls wait, because vLLM is paused."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="publishes by each transport")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    os.environ["OMP_NUM_THREADS"] = "1"  # vLLM has no flag for it
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder:
        model = make_model(Path(folder) / "model", **SIZES)
        num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        timings = asyncio.run(_measure(model, Path(folder), args.rounds))
    header = ["transport", "s per publish (range)", "s per GB", "calls wait, s"]
    rows = [_row(name, timing, num_bytes) for name, timing in timings.items()]
    title = f"{num_bytes / 10**6:.0f} MB of weights, {args.rounds} publishes each"
    print_table(header, rows, title)
    if args.write:
        table = markdown_table(header, rows)
        replace_section(TITLE, f"{text}\n{title}:\n\n{table}\n{NO_GPU}\n")


def _row(name: str, timing: Timing, num_bytes: int) -> list[str]:
    median = statistics.median(timing.total_s)
    return [
        name,
        f"{median:.2f} ({min(timing.total_s):.2f} to {max(timing.total_s):.2f})",
        f"{median * GB / num_bytes:.1f}",
        f"{statistics.median(timing.waiting_s):.2f}",
    ]


async def _measure(model: Path, run_dir: Path, num_rounds: int) -> dict[str, Timing]:
    spec = EngineSpec(
        "vllm",
        run_dir,
        str(model),
        "model",
        extra_args=[f"--max-model-len={MAX_MODEL_LEN}", "--dtype=float32"],
        weight_transport=VLLM,
    )
    vllm = VllmRollout(spec)
    trainer = ChildEngine(EngineSpec("embedded", run_dir, str(model), "model", train_only=True))
    weights = WeightsFolder(weights_folder(run_dir, None), trainer)
    backend = TwoProcesses(vllm, trainer, weights_folder(run_dir, None))
    probe = WeightProbe(backend)
    timings = {FOLDER: Timing(), VLLM: Timing()}
    version = 0

    async def by_folder() -> None:
        started = time.perf_counter()
        async with weights.exported() as folder:
            paused = time.perf_counter()
            await vllm.load_weights(folder, version)
            timings[FOLDER].waiting_s.append(time.perf_counter() - paused)
        timings[FOLDER].total_s.append(time.perf_counter() - started)

    async def by_vllm() -> None:
        started = time.perf_counter()
        await vllm.receive_weights(trainer.send_weights, _no_folder, version)
        timings[VLLM].total_s.append(time.perf_counter() - started)
        timings[VLLM].waiting_s.append(timings[VLLM].total_s[-1])

    try:
        await backend.start()
        await trainer.boot(TrainJob())
        with Progress() as progress:
            for number in progress.track(range(num_rounds + 1), description="rounds"):
                for publish in (by_folder, by_vllm):
                    version += 1
                    await publish()
                    result = await probe.run(version)
                    assert result is not None and result.is_same, str(result)
                if number == 0:  # each transport's first publish loads code
                    timings.update({FOLDER: Timing(), VLLM: Timing()})
    finally:
        await backend.close()
    return timings


@asynccontextmanager
async def _no_folder() -> AsyncGenerator[Path]:
    """Fail instead of a transfer that passes the weights through a folder after all."""
    raise BackendError("the trainer could not send its weights")
    yield Path()


if __name__ == "__main__":
    main()
