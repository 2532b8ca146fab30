"""Latency of requests that are sent one at a time, and the time between the last byte of the last
sibling and the first byte that the app gets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.proxy_parts.cpu_grid import SIZES
from benchmarks.proxy_parts.load import Prompts, send_one
from benchmarks.proxy_parts.targets import Target

SIZE = "1 KB"


@dataclass(slots=True)
class Alone:
    """Latencies in seconds of each target and kind of answer, by round."""

    rounds: dict[tuple[str, bool], list[list[float]]] = field(
        default_factory=dict[tuple[str, bool], list[list[float]]]
    )
    """Rounds by name of the target and whether the answers are streamed."""

    def percentiles(self, target: str, streamed: bool) -> tuple[float, float]:
        """Return p50 and p99 as medians over the rounds."""
        cuts = [percentiles(latencies) for latencies in self.rounds[target, streamed]]
        p50s, p99s = zip(*cuts, strict=True)
        return statistics.median(p50s), statistics.median(p99s)

    def added(self, target: str, streamed: bool, base: str) -> tuple[float, float]:
        """Return p50 and p99 above those of `base`, as medians of the differences per round."""
        pairs = zip(self.rounds[target, streamed], self.rounds[base, streamed], strict=True)
        cuts = [(percentiles(ours), percentiles(theirs)) for ours, theirs in pairs]
        return (
            statistics.median(ours[0] - theirs[0] for ours, theirs in cuts),
            statistics.median(ours[1] - theirs[1] for ours, theirs in cuts),
        )


async def measure_alone(
    http: aiohttp.ClientSession, targets: Sequence[Target], num: int, num_rounds: int
) -> Alone:
    """Send `num` requests to each target, whole and streamed, in each round. Within a round the
    targets take turns with each request."""
    alone, prompts = Alone(), Prompts()
    for _ in range(num_rounds):
        for streamed in (False, True):
            latencies: dict[str, list[float]] = {target.name: [] for target in targets}
            for _ in range(num):
                for target in targets:
                    (body,) = prompts.bodies(1, SIZES[SIZE], streamed=streamed)
                    timing = await send_one(http, target.process.url, body)
                    latencies[target.name].append(timing.latency_s)
                    target.num_sent += 1
            for name, values in latencies.items():
                alone.rounds.setdefault((name, streamed), []).append(values)
    return alone


async def measure_tail(
    http: aiohttp.ClientSession, target: Target, num: int, *, streamed: bool
) -> list[float]:
    """Return the seconds from the last byte of the last sibling, as the proxy gets it, to the first
    byte of the app's answer, for `num` requests one at a time."""
    assert target.byte_clock is not None, f"{target.name} was started without a byte clock"
    prompts = Prompts()
    tails: list[float] = []
    for body in prompts.bodies(num, SIZES[SIZE], streamed=streamed):
        timing = await send_one(http, target.process.url, body)
        target.num_sent += 1
        async with http.get(f"{target.byte_clock.url}/last_byte") as reply:
            last_byte = float(await reply.text())
        assert timing.started < last_byte < timing.ended, "the byte clock missed an answer"
        tails.append(timing.first_byte - last_byte)
    return tails


def percentiles(latencies: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99."""
    cuts = statistics.quantiles(latencies, n=100)
    return cuts[49], cuts[98]
