"""Measure the time to the first token of a session's next turn, with and without a prefix cache.

    python -m benchmarks.next_turn [--models demo,25M] [--write]

A session begins with a random prompt, which is answered. The next turn's prompt is this prompt, its
answer and a new message. Two embedded engines answer the same turns, one engine after the other in
each round: `warm` has the prefix cache, and `cold` has none. Each engine uses one torch thread. The
first round is not counted. CPU time is the CPU time of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.embedded_decode import Times, model_folder
from benchmarks.forest_parts.cases import random_ids
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm_server.types.sampling import Sampling

TITLE = "next_turn"
PROMPT_TOKENS = {"demo": 320}
"""Number of tokens of a session's first prompt, by model. The demo's model has a context of 512."""
LONG_PROMPT_TOKENS = 768
"""Number of tokens of a session's first prompt for all other models, which have a context of 1024
tokens."""
ANSWER_TOKENS = 64
MESSAGE_TOKENS = 24
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", default="demo,25M", help="models to measure")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder:
        for name in args.models.split(","):
            rows += _measure(name, model_folder(name, Path(folder) / name), args.rounds)
    header = ["model", "tokens", "engine", "CPU ms", "x cold", "wall ms", "x cold"]
    print_table(header, rows, "first token of a session's next turn")
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(header, rows)}")


def _measure(name: str, path: Path, num_rounds: int) -> list[list[str]]:
    module: Any = import_module("fakevllm_server.backends.embedded.engine")
    engines: dict[str, Any] = {}
    num_tokens = PROMPT_TOKENS.get(name, LONG_PROMPT_TOKENS)
    try:
        engines["warm"] = module.EmbeddedEngine(module.EngineConfig(path, "model"))
        config = module.EngineConfig(path, "model", prefix_cache_mib=0)
        engines["cold"] = module.EmbeddedEngine(config)
        times = asyncio.run(_run_rounds(engines, num_tokens, num_rounds))
    finally:
        for engine in engines.values():
            engine.close()
    cold = times["cold"]
    return [
        [
            name,
            str(num_tokens + ANSWER_TOKENS + MESSAGE_TOKENS),
            way,
            f"{1000 * statistics.median(one.cpu_s):.1f}",
            f"{_ratio(one.cpu_s, cold.cpu_s):.2f}",
            f"{1000 * statistics.median(one.wall_s):.1f}",
            f"{_ratio(one.wall_s, cold.wall_s):.2f}",
        ]
        for way, one in times.items()
    ]


async def _run_rounds(
    engines: dict[str, Any], num_tokens: int, num_rounds: int
) -> dict[str, Times]:
    times = {way: Times() for way in engines}
    chance = random.Random(0)
    for number in range(num_rounds + 1):
        prompt = random_ids(chance, num_tokens)
        answer = await _sample(engines["warm"], prompt, ANSWER_TOKENS)
        turn = [*prompt, *answer, *random_ids(chance, MESSAGE_TOKENS)]
        for way, engine in engines.items():
            cpu, wall = time.process_time(), time.perf_counter()
            await _sample(engine, turn, 1)
            if number > 0:
                times[way].cpu_s.append(time.process_time() - cpu)
                times[way].wall_s.append(time.perf_counter() - wall)
    return times


async def _sample(engine: Any, prompt: list[int], num_tokens: int) -> list[int]:
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    return [token.id async for tokens in engine.generate(prompt, sampling) for token in tokens]


def _ratio(seconds: list[float], cold_s: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(own / cold for own, cold in zip(seconds, cold_s, strict=True))


if __name__ == "__main__":
    main()
