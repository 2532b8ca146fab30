"""Measure how long one training step holds the event loop of the server, which relays all streams.

    python -m benchmarks.loop_stalls [--tokens 13000000] [--rounds 3] [--write]

The parts of a server that make a step (pool, journal, planning, the client of the engine) run here
in one event loop. The trainer is the fake engine, in a process of its own. A probe task wakes every
millisecond and records how late it woke, while a step is planned, sent, trained and recorded.

On a busy machine, the probe is also late when the process waits for a CPU. Therefore the probe
reads the CPU time of the process too. Only the part of a delay in which the process computed counts
as a stall. The report has the stalls, the whole delays, and the delays of an event loop that does
nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.step import StepRunner
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode, VersionSpan
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.token_masks import TokenMasks, packed

TITLE = "loop_stalls"
HEADER = (
    "calls of the step",
    "tokens",
    "longest stall ms, by round",
    "stalls p99.9 ms",
    "longest delay ms, by round",
    "idle loop, longest delay ms",
    "step s",
)
NUM_SIBLINGS = 8
PROBE_INTERVAL_S = 0.001
VOCABULARY_SIZE = 151_936
NUM_SETS = 16
"""Number of different sets of allowed tokens in a call with dense masks. A dense mask contains
about half of the vocabulary."""
MASK_EVERY = 8
"""Every call whose index is a multiple of this number has dense masks."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """Lengths of the calls of a step."""

    name: str
    num_prompt: int
    num_response: int


SHAPES = (CallShape("long prompts", 24_400, 1_000), CallShape("long answers", 400, 25_000))


@dataclass(frozen=True, slots=True)
class Stalls:
    """Measurements of the probe during one action."""

    delays_ms: list[float]
    """For each wake-up of the probe: how late the probe woke, in milliseconds."""
    stalls_ms: list[float]
    """For each wake-up of the probe: how much of the delay the process spent computing, in
    milliseconds."""
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=13_000_000, help="tokens of one step")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each kind")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    rows = [_measure(shape, args.tokens, args.rounds) for shape in SHAPES]
    table = Table(*HEADER, title="stalls of the server's event loop during one training step")
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(HEADER, rows)}\n{_explanation()}")


def _measure(shape: CallShape, num_tokens: int, num_rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        steps, idle = uvloop.run(_run_steps(Path(folder), shape, num_tokens, num_rounds))
    stalls_ms = [stall for step in steps for stall in step.stalls_ms]
    return [
        f"{shape.name}: {shape.num_prompt:,} + {shape.num_response:,}",
        f"{num_tokens:,}",
        ", ".join(f"{max(step.stalls_ms):.1f}" for step in steps),
        f"{statistics.quantiles(stalls_ms, n=1000)[-1]:.1f}",
        ", ".join(f"{max(step.delays_ms):.0f}" for step in steps),
        f"{max(idle.delays_ms):.0f}",
        f"{statistics.median(step.seconds for step in steps):.1f}",
    ]


async def _run_steps(
    folder: Path, shape: CallShape, num_tokens: int, num_rounds: int
) -> tuple[list[Stalls], Stalls]:
    """Return the stalls of each step, and those of an idle loop over the same time."""
    num_groups = max(1, num_tokens // (NUM_SIBLINGS * (shape.num_prompt + shape.num_response)))
    job = TrainJob(num_repeat=NUM_SIBLINGS, batch_size=num_groups, save_freq=1_000_000)
    trainer = ChildEngine(EngineSpec("fake", folder, None, "model"))
    await trainer.launch()
    await trainer.boot(job)
    journal = Journal(folder / "journal.sqlite")
    engine, pool, runlog = EngineLifecycle(), Pool(job), RunLog(journal)
    folders = CheckpointFolders(folder / "checkpoints")
    checkpointer = Checkpointer(trainer, folders, journal, job.save_freq)
    runner = StepRunner(job, engine, pool, trainer, runlog, checkpointer)
    runner.resume([])
    steps: list[Stalls] = []
    try:
        for number in range(num_rounds):
            pool.restore(_groups(number, num_groups, shape), {}, time.monotonic())
            gc.collect()
            steps.append(await _probed(lambda: _step(runner)))
            engine.global_step += 1
        idle = await _probed(lambda: asyncio.sleep(statistics.median(s.seconds for s in steps)))
    finally:
        await trainer.close()
        journal.close()
    return steps, idle


async def _step(runner: StepRunner) -> None:
    version = await runner.run()
    assert version is not None, "the step was not made"


async def _probed(action: Callable[[], Awaitable[object]]) -> Stalls:
    """Run an action. Return how late the event loop woke the probe during the action."""
    delays_ms: list[float] = []
    stalls_ms: list[float] = []
    is_over = False

    async def probe() -> None:
        while not is_over:
            before_s, cpu_before_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(PROBE_INTERVAL_S)
            late_s = time.perf_counter() - before_s - PROBE_INTERVAL_S
            computed_s = time.process_time() - cpu_before_s
            delays_ms.append(1000 * max(0.0, late_s))
            stalls_ms.append(1000 * max(0.0, min(late_s, computed_s)))

    probing = asyncio.create_task(probe())
    await asyncio.sleep(10 * PROBE_INTERVAL_S)
    started = time.perf_counter()
    await action()
    seconds = time.perf_counter() - started
    is_over = True
    await probing
    return Stalls(delays_ms, stalls_ms, seconds)


def _groups(number: int, num_groups: int, shape: CallShape) -> list[FinishedGroup]:
    """Return groups in which each call has its own lists of tokens, as captured calls have."""
    rng = random.Random(number)
    names = [f"{number} {index}" for index in range(num_groups)]
    return [
        FinishedGroup(name, [_episode(rng, i, shape) for i in range(NUM_SIBLINGS)])
        for name in names
    ]


def _episode(rng: random.Random, index: int, shape: CallShape) -> ScoredEpisode:
    ids = rng.choices(range(VOCABULARY_SIZE), k=shape.num_prompt + shape.num_response)
    call = RecordedCall(
        prompt_ids=ids[: shape.num_prompt],
        response_ids=ids[shape.num_prompt :],
        logprobs=[-rng.random() for _ in range(shape.num_response)],
        versions=[VersionSpan(0, 0, shape.num_response)],
        temperature=1.0,
        finish_reason="stop",
        untrainable=None,
        allowed=_masks(rng, shape.num_response) if index % MASK_EVERY == 0 else None,
    )
    return ScoredEpisode(index, rng.random(), [call])


def _masks(rng: random.Random, num_response: int) -> TokenMasks:
    sets = [packed(rng.randbytes(VOCABULARY_SIZE // 8)) for _ in range(NUM_SETS)]
    return TokenMasks(sets, [number % NUM_SETS for number in range(num_response)])


def _explanation() -> str:
    return (
        f"Each group has {NUM_SIBLINGS} calls. One call in {MASK_EVERY} was sampled under a "
        f"grammar and has {NUM_SETS} dense sets of allowed tokens. The loop is probed each "
        "millisecond. A delay counts as a stall only as far as the process computed meanwhile, so "
        "that waiting for a CPU of a busy machine does not count. The goal is at most 20 ms."
    )


if __name__ == "__main__":
    main()
