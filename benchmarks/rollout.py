"""Measure tokens per second and group latency of the rollout engines.

    python -m benchmarks.rollout [--engines embedded,vllm] [--threads 1,2] [--groups 8] [--write]

A group is 8 completions of 64 tokens each for one prompt of about 512 tokens. Four groups are
sampled at a time. All engines run at once, and take turns in each round, so that all of them have
the same conditions. Each engine is called in two ways:

* directly: 8 plain requests to the engine's own socket, without token ids and logprobs
* through: one request of an app to the proxy, which is fanned out, captured, scored by a hook, and
  written to the ledger

The model is a Qwen3 with 25 million random weights, created by the script. Both engines compute in
float32 with the same number of torch's threads. vLLM's own choice would be bfloat16, which is many
times slower on CPUs without instructions for it. vLLM needs the environment of
server/cpu/make_environment.sh.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress

from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from tests.e2e.processes import Process, Processes

TITLE = "rollout"
NUM_SIBLINGS = 8
COMPLETION_TOKENS = 64
PROMPT_SUMS = 46
"""Number of lines of a prompt. They have about 512 tokens with the demo's tokenizer."""
CONCURRENT_GROUPS = 4
ROUNDS = 5
START_TIMEOUT_S = 240.0
MAX_MODEL_LEN = 1024

HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(len(answer["content"] or "")) for answer in all_answers]
"""
VLLM_ARGS = [f"--max-model-len={MAX_MODEL_LEN}", "--max-num-seqs=64", "--dtype=float32"]


@dataclass(slots=True)
class Sample:
    """Measurements of one engine called in one way, from all rounds."""

    rates: list[float] = field(default_factory=list[float])
    """Tokens per second of each round."""
    latencies_s: list[float] = field(default_factory=list[float])
    """Seconds of each group, from its first request to its last answer."""


Way = tuple[str, str, str]
"""A way to sample: (engine, number of threads, how the engine is called)."""
SampleGroup = Callable[[str], Awaitable[int]]
"""Function that samples a group for a prompt and returns the number of sampled tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--engines", default="embedded,vllm", help="engines to measure")
    parser.add_argument(
        "--threads", default="1", help="numbers of torch's threads, the same for each engine"
    )
    parser.add_argument(
        "--groups", type=int, default=8, help="groups per engine, way of calling and round"
    )
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder, ExitStack() as stack:
        model = make_model(Path(folder) / "model")
        engines: dict[tuple[str, str], tuple[Process, Path]] = {}
        for engine, threads in itertools.product(args.engines.split(","), args.threads.split(",")):
            # vLLM has no flag for it.
            os.environ["OMP_NUM_THREADS"] = threads
            started = stack.enter_context(Processes(Path(folder) / f"{engine}-{threads}"))
            engines[engine, threads] = _start(started, engine, threads, model)
        samples = asyncio.run(_measure(engines, args.groups))
    header, rows = _table(samples)
    print_table(header, rows, "rollout engines, directly and through proxy and server")
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(header, rows)}")


def make_model(folder: Path, **sizes: int) -> Path:
    """Save a random model with the demo's tokenizer. The model is larger than the demo's model, and
    has a longer context. `sizes` replaces settings of the model's config."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = transformers.Qwen3Config(**(settings | sizes))
    network = transformers.Qwen3ForCausalLM(config)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _start(started: Processes, engine: str, threads: str, model: Path) -> tuple[Process, Path]:
    """Start server and proxy, and return the proxy and the engine's socket.

    Nothing is trained, because no batch ever fills.
    """
    started.folder.mkdir(parents=True, exist_ok=True)
    (started.folder / "reward.py").write_text(HOOK)
    config = started.folder / "fakevllm.toml"
    config.write_text(
        f"[hooks]\npath = {json.dumps(str(started.folder))}\n\n"
        f"[job]\nnum_repeat = {NUM_SIBLINGS}\nbatch_size = 10000\n"
    )
    own = VLLM_ARGS if engine == "vllm" else [f"--torch-threads={threads}"]
    arguments = [f"--engine-arg={argument}" for argument in own]
    server = started.server(
        "--rollout", engine, "--trainer", "embedded", "--model", str(model), *arguments
    )
    proxy = started.proxy(server, "--config", str(config), wait=False)
    return proxy.wait_until_healthy(START_TIMEOUT_S), next(server.folder.glob("engine-*.sock"))


async def _measure(
    engines: dict[tuple[str, str], tuple[Process, Path]], num_groups: int
) -> dict[Way, Sample]:
    texts = prompts()
    ways: dict[Way, SampleGroup] = {}
    async with AsyncExitStack() as stack:
        app = await _session(stack, aiohttp.TCPConnector(limit=0))
        for (engine, threads), (proxy, socket) in engines.items():
            direct = await _session(stack, aiohttp.UnixConnector(str(socket), limit=0))
            ways[engine, threads, "directly"] = partial(_sample_directly, direct)
            ways[engine, threads, "through"] = partial(_sample_through_proxy, app, proxy.url)
        samples = {way: Sample() for way in ways}
        with Progress() as progress:
            bar = progress.add_task("rounds", total=(ROUNDS + 1) * len(ways) * num_groups)
            for round_ in range(ROUNDS + 1):
                for way, sample_group in ways.items():
                    sample = await _run_round(
                        sample_group, texts, num_groups, lambda: progress.advance(bar)
                    )
                    if round_ > 0:  # the first round warms up caches and connections
                        samples[way].rates += sample.rates
                        samples[way].latencies_s += sample.latencies_s
    return samples


async def _session(
    stack: AsyncExitStack, connector: aiohttp.BaseConnector
) -> aiohttp.ClientSession:
    return await stack.enter_async_context(aiohttp.ClientSession(connector=connector))


async def _run_round(
    sample_group: SampleGroup,
    prompts: Iterator[str],
    num_groups: int,
    on_group: Callable[[], object],
) -> Sample:
    sample = Sample()
    slots = asyncio.Semaphore(CONCURRENT_GROUPS)
    num_tokens = 0

    async def run_group(prompt: str) -> None:
        nonlocal num_tokens
        async with slots:
            started = time.perf_counter()
            num_sampled = await sample_group(prompt)
            num_tokens += num_sampled
            sample.latencies_s.append(time.perf_counter() - started)
            on_group()

    started = time.perf_counter()
    await asyncio.gather(*(run_group(next(prompts)) for _ in range(num_groups)))
    sample.rates.append(num_tokens / (time.perf_counter() - started))
    return sample


async def _sample_directly(http: aiohttp.ClientSession, prompt: str) -> int:
    url = "http://engine/v1/chat/completions"
    return sum(await asyncio.gather(*(_send(http, url, prompt) for _ in range(NUM_SIBLINGS))))


async def _sample_through_proxy(http: aiohttp.ClientSession, proxy_url: str, prompt: str) -> int:
    """Return the number of tokens of all siblings, which are equally long.

    The answer's usage counts only the served sibling.
    """
    return NUM_SIBLINGS * await _send(http, f"{proxy_url}/v1/chat/completions", prompt)


async def _send(http: aiohttp.ClientSession, url: str, prompt: str) -> int:
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": COMPLETION_TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    async with http.post(url, json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
    num_tokens: int = reply["usage"]["completion_tokens"]
    assert num_tokens == COMPLETION_TOKENS, reply["usage"]
    return num_tokens


def prompts() -> Iterator[str]:
    """Yield prompts that already differ in their first lines, so that groups share no prefix."""
    for number in itertools.count():
        lines = (f"{number + line} plus {line} is what?" for line in range(PROMPT_SUMS))
        yield "\n".join(lines)


def _table(samples: dict[Way, Sample]) -> tuple[list[str], list[list[str]]]:
    header = [
        "engine",
        "threads",
        "called",
        "tokens/s (median of rounds)",
        "x directly",
        "group p50 s",
        "p95 s",
    ]
    rows: list[list[str]] = []
    for (engine, threads, way), sample in samples.items():
        rate = statistics.median(sample.rates)
        ratios = zip(sample.rates, samples[engine, threads, "directly"].rates, strict=True)
        ratio = statistics.median(through / direct for through, direct in ratios)
        cuts = statistics.quantiles(sample.latencies_s, n=20)
        figures = [f"{rate:.0f}", f"{ratio:.3f}", f"{cuts[9]:.2f}", f"{cuts[18]:.2f}"]
        rows.append([engine, threads, way, *figures])
    return header, rows


if __name__ == "__main__":
    main()
