"""Two measurements: the latency of requests that are sent one at a time, and the time between the
last byte of the last sibling and the first byte that the app gets."""

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
    """Maps (name of the target, whether the answers are streamed) to the latencies of each
    round."""

    def percentiles(self, target: str, streamed: bool) -> tuple[float, float]:
        """Return p50 and p99 as medians over the rounds."""
        cuts = [percentiles(latencies) for latencies in self.rounds[target, streamed]]
        p50s, p99s = zip(*cuts, strict=True)
        return statistics.median(p50s), statistics.median(p99s)

    def added(self, target: str, streamed: bool, base: str) -> tuple[float, float]:
        """Return the differences to p50 and p99 of `base`, as medians over the rounds."""
        pairs = zip(self.rounds[target, streamed], self.rounds[base, streamed], strict=True)
        cuts = [(percentiles(ours), percentiles(theirs)) for ours, theirs in pairs]
        return (
            statistics.median(ours[0] - theirs[0] for ours, theirs in cuts),
            statistics.median(ours[1] - theirs[1] for ours, theirs in cuts),
        )


async def measure_alone(
    http: aiohttp.ClientSession, targets: Sequence[Target], num: int, num_rounds: int
) -> Alone:
    """In each round, send `num` requests for whole answers and `num` requests for streams to each
    target. The targets take turns after each request."""
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
    """Send `num` requests, one at a time. For each request, return the seconds between two times:
    the proxy gets the last byte of the last sibling, and the app gets the first byte of its
    answer."""
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
    """Return the percentiles p50 and p99."""
    cuts = statistics.quantiles(latencies, n=100)
    return cuts[49], cuts[98]
