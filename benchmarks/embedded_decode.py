"""Measure decoding with the embedded engine, with a hand-written loop, and with
`transformers.generate`.

    python -m benchmarks.embedded_decode [--models demo,4M,25M] [--batches 1,8,32] [--write]
    python -m benchmarks.embedded_decode --device cuda --models 0.5B     # with random weights

All three sample the same number of tokens for the same number of prompts of equal length, on one
torch thread, in float32 on a CPU and in bfloat16 on a GPU. The hand loop is the least that a
program can do with the model class of transformers: a cache whose tensors are allocated once, no
attention mask, one random draw per step, and no log-probabilities. The engine is the whole class
EmbeddedEngine, with its thread, its streams and the log-probability of each token.

The three ways take turns in each round, and the first round is not counted. Figures are medians
over the rounds. CPU time is the CPU time of the process. On a machine that also does other work,
CPU time varies less than wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.forest_parts.cases import random_ids
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from benchmarks.rollout import make_model
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.types.sampling import Sampling

TITLES = {"cpu": "embedded_decode", "cuda": "embedded_decode, on a GPU"}
PROMPT_TOKENS = 128
COMPLETION_TOKENS = 64
ROUNDS = 5
SMALL_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
"""Sizes of the model of 4 million parameters. Its other sizes are those of the larger model."""
LARGE_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Sizes of the model of 0.5 billion parameters."""
SIZES = {"25M": {}, "4M": SMALL_SIZES, "0.5B": LARGE_SIZES}
HAND_LOOP = "hand loop"


@dataclass(slots=True)
class Times:
    """Seconds that one way of sampling took in each round."""

    cpu_s: list[float] = field(default_factory=list[float])
    wall_s: list[float] = field(default_factory=list[float])


Sample = Callable[[list[list[int]]], object]
"""Function that samples COMPLETION_TOKENS tokens for each prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", default="demo,4M,25M", help="models to measure")
    parser.add_argument("--batches", default="1,8,32", help="numbers of prompts to sample at once")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token, no draw")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder:
        for name in args.models.split(","):
            path = model_folder(name, Path(folder) / name)
            for batch in map(int, args.batches.split(",")):
                rows += _measure(name, path, batch, args)
    header = ["model", "rows", "way", "CPU tokens/s", "x hand loop", "wall tokens/s", "x hand loop"]
    print_table(header, rows, "decoding with the embedded engine")
    if args.write:
        replace_section(TITLES[args.device], f"{text}\n{markdown_table(header, rows)}")


def model_folder(name: str, folder: Path) -> Path:
    """Return the folder of the model with this name. Models other than the demo's are written to
    `folder`."""
    if name == "demo":
        return DEMO_MODEL_DIR
    return make_model(folder, **SIZES[name])


def _measure(name: str, path: Path, batch: int, args: argparse.Namespace) -> list[list[str]]:
    engines: Any = import_module("fakevllm_server.backends.embedded.engine")
    engine: Any = engines.EmbeddedEngine(engines.EngineConfig(path, "model", device=args.device))
    greedy: bool = args.greedy
    try:
        model = _load(path, args.device)
        ways: dict[str, Sample] = {
            HAND_LOOP: lambda prompts: sample_by_hand(model, prompts, greedy),
            "embedded": lambda prompts: asyncio.run(_sample_in_engine(engine, prompts, greedy)),
            "generate": lambda prompts: _generate(model, prompts, greedy),
        }
        rows = _rows(name, batch, _run_rounds(ways, batch, args.rounds))
        print(*(" | ".join(row) for row in rows), sep="\n", file=sys.stderr, flush=True)
        return rows
    finally:
        engine.close()


def _run_rounds(ways: dict[str, Sample], batch: int, num_rounds: int) -> dict[str, Times]:
    """In each round, sample once in every way. Each round has new prompts, so that no prompt is in
    a cache."""
    times = {way: Times() for way in ways}
    chance = random.Random(0)
    for number in range(num_rounds + 1):
        prompts = [random_ids(chance, PROMPT_TOKENS) for _ in range(batch)]
        for way, sample in ways.items():
            cpu, wall = time.process_time(), time.perf_counter()
            sample(prompts)
            if number > 0:
                times[way].cpu_s.append(time.process_time() - cpu)
                times[way].wall_s.append(time.perf_counter() - wall)
    return times


def _rows(name: str, batch: int, times: dict[str, Times]) -> list[list[str]]:
    """Return one row of the table for each way of sampling. A ratio is the median over the rounds
    of the ratio in each round."""
    num_tokens = batch * COMPLETION_TOKENS
    floor = times[HAND_LOOP]
    return [
        [
            name,
            str(batch),
            way,
            f"{num_tokens / statistics.median(one.cpu_s):.0f}",
            f"{_ratio(floor.cpu_s, one.cpu_s):.2f}",
            f"{num_tokens / statistics.median(one.wall_s):.0f}",
            f"{_ratio(floor.wall_s, one.wall_s):.2f}",
        ]
        for way, one in times.items()
    ]


def _ratio(floor_s: list[float], seconds: list[float]) -> float:
    return statistics.median(least / own for least, own in zip(floor_s, seconds, strict=True))


async def _sample_in_engine(engine: Any, prompts: list[list[int]], greedy: bool) -> None:
    sampling = Sampling(
        max_tokens=COMPLETION_TOKENS, ignore_eos=True, temperature=0.0 if greedy else 1.0
    )

    async def sample(prompt: list[int]) -> int:
        return sum([len(tokens) async for tokens in engine.generate(prompt, sampling)])

    nums = await asyncio.gather(*map(sample, prompts))
    assert nums == [COMPLETION_TOKENS] * len(prompts), nums


def _load(path: Path, device: str) -> Any:
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval()


def sample_by_hand(model: Any, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
    """Return the sampled ids of each prompt. All prompts have the same length."""
    torch: Any = import_module("torch")
    caches: Any = import_module("benchmarks.hand_loop_cache")
    with torch.inference_mode():
        cache = caches.make_cache(model.config, len(prompts[0]) + COMPLETION_TOKENS)
        ids = torch.tensor(prompts, device=model.device)
        position = torch.arange(ids.shape[1], device=model.device)[None]
        chosen: list[Any] = []
        for _ in range(COMPLETION_TOKENS):
            output = model(
                input_ids=ids,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[:, -1]
            if greedy:
                ids = logits.argmax(-1, keepdim=True)
            else:
                ids = torch.multinomial(logits.softmax(-1), 1)
            chosen.append(ids)
            position = position[:, -1:] + 1
        return torch.cat(chosen, 1).tolist()


def _generate(model: Any, prompts: list[list[int]], greedy: bool) -> None:
    torch: Any = import_module("torch")
    with torch.inference_mode():
        ids = torch.tensor(prompts, device=model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COMPLETION_TOKENS,
            min_new_tokens=COMPLETION_TOKENS,
            do_sample=not greedy,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
        )


if __name__ == "__main__":
    main()
