"""CPU time of one request by process, number of siblings, size of the prompt and kind of answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.proxy_parts.load import Prompts, send
from benchmarks.proxy_parts.targets import Cpu, Target

CONCURRENCY = 8
SIZES = {"1 KB": 1_000, "100 KB": 100_000, "1 MB": 1_000_000}
"""Bytes of a request's body by name."""
MAX_REQUESTS = 400
"""Maximum number of requests of one cell in one round."""
NUM_WARM_UP = 100
"""Requests of the smallest size that each target gets first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the grid."""

    target: str
    size: str
    streamed: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and for how long."""

    sizes: Sequence[str] = tuple(SIZES)
    num_rounds: int = 5
    round_s: float = 1.0
    """Seconds that the requests of one cell take in one round. At least one request is sent, even
    if it takes longer."""


@dataclass(slots=True)
class Grid:
    """CPU seconds of one request in each round, by cell."""

    rounds: dict[Cell, list[Cpu]] = field(default_factory=dict[Cell, list[Cpu]])

    def median_s(self, cell: Cell, process: str) -> float:
        """Return the median over the rounds of a process's CPU seconds. `process` is the name of a
        field or property of Cpu."""
        return statistics.median(getattr(cpu, process) for cpu in self.rounds[cell])

    def ratio(self, cell: Cell, process: str, floor: Cell, floor_process: str) -> float:
        """Return the CPU seconds of `process` in `cell`, divided by those of `floor_process` in
        `floor`, as the median over the rounds."""
        pairs = zip(self.rounds[cell], self.rounds[floor], strict=True)
        return statistics.median(
            getattr(ours, process) / getattr(theirs, floor_process) for ours, theirs in pairs
        )


async def measure_grid(http: aiohttp.ClientSession, targets: Sequence[Target], plan: Plan) -> Grid:
    """In each round, measure all cells one after another. All cells are then measured under the
    same conditions."""
    grid = Grid()
    prompts = Prompts()
    for target in targets:
        warm_up = math.ceil(NUM_WARM_UP / target.num_siblings)
        for streamed in (False, True):
            await _send(http, target, prompts, warm_up, "1 KB", streamed)
        target.wait_until_resting()
    num_requests: dict[Cell, int] = {}
    for size in plan.sizes:
        for _ in range(plan.num_rounds):
            for streamed in (False, True):
                for target in targets:
                    cell = Cell(target.name, size, streamed)
                    if cell not in num_requests:
                        num_requests[cell] = await _choose_number(
                            http, target, prompts, cell, plan.round_s
                        )
                    num = num_requests[cell]
                    before = target.wait_until_resting()
                    await _send(http, target, prompts, num, size, streamed)
                    spent = target.wait_until_resting() - before
                    grid.rounds.setdefault(cell, []).append(spent / num)
    return grid


async def _choose_number(
    http: aiohttp.ClientSession, target: Target, prompts: Prompts, cell: Cell, round_s: float
) -> int:
    """Return the number of requests that take about `round_s` seconds, estimated from the CPU time
    of one request."""
    before = target.wait_until_resting()
    await _send(http, target, prompts, 1, cell.size, cell.streamed)
    spent = target.wait_until_resting() - before
    return max(1, min(MAX_REQUESTS, int(round_s / max(spent.total, 1e-4))))


async def _send(
    http: aiohttp.ClientSession,
    target: Target,
    prompts: Prompts,
    num: int,
    size: str,
    streamed: bool,
) -> None:
    bodies = prompts.bodies(num, SIZES[size], streamed=streamed)
    await send(http, target.process.url, bodies, CONCURRENCY)
    target.num_sent += num
