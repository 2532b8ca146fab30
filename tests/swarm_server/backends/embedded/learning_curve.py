"""Train with GRPO on the demo's sums, with an engine and without server or proxy.

    export PYTHONPATH=.:server:adapters:tests
    python -m swarm_server.backends.embedded.learning_curve --seeds 0 1 2

prints the learning curve of the shipped model under the demo's settings.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from swarm_server.backends.embedded.engine_helpers import ask, call_of, collect

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.demo_model.sums import Sum, random_sum
from fakevllm_server.backends.embedded.engine import EmbeddedEngine, EngineConfig
from fakevllm_server.types.backend import Batch, Call, LossSpec
from fakevllm_server.types.sampling import Sampling, Token

SAMPLING = Sampling(max_tokens=24)


async def train_on_sums(
    engine: EmbeddedEngine, job: TrainJob, num_steps: int, num_siblings: int, seed: int = 0
) -> list[float]:
    """Train on the demo's sums, and return the mean reward of each step."""
    rng = random.Random(seed)
    await engine.boot(job)
    rewards: list[float] = []
    for step in range(1, num_steps + 1):
        groups = await asyncio.gather(
            *(
                _group(engine, random_sum(rng), num_siblings, job.std_floor)
                for _ in range(job.batch_size)
            )
        )
        rewards.append(statistics.mean(reward for reward, _ in groups))
        calls = [call for _, calls in groups for call in calls]
        await engine.step(Batch(step, calls), LossSpec.of(job))
        await engine.publish(step)
    return rewards


async def success(
    engine: EmbeddedEngine, num_sums: int, sampling: Sampling = SAMPLING, seed: int = 1
) -> float:
    rng = random.Random(seed)
    sums = [random_sum(rng) for _ in range(num_sums)]
    rewards = await asyncio.gather(*(_attempt(engine, one, sampling) for one in sums))
    return statistics.mean(reward for reward, _, _ in rewards)


async def _group(
    engine: EmbeddedEngine, one: Sum, num_siblings: int, std_floor: float
) -> tuple[float, list[Call]]:
    attempts = await asyncio.gather(*(_attempt(engine, one, SAMPLING) for _ in range(num_siblings)))
    rewards = [reward for reward, _, _ in attempts]
    mean = statistics.mean(rewards)
    if min(rewards) == max(rewards):
        return mean, []
    spread = max(statistics.stdev(rewards), std_floor)
    return mean, [
        call_of(prompt, tokens, SAMPLING, (reward - mean) / spread)
        for reward, prompt, tokens in attempts
    ]


async def _attempt(
    engine: EmbeddedEngine, one: Sum, sampling: Sampling
) -> tuple[float, Sequence[int], list[Token]]:
    prompt = engine.render(ask(one.question))
    tokens = await collect(engine.generate(prompt, sampling))
    is_ended = tokens[-1].id in engine.eos_ids
    is_right = one.is_solved_by(engine.decode([token.id for token in tokens]))
    return float(is_ended and is_right), prompt, tokens


async def _report(options: argparse.Namespace, seed: int) -> None:
    engine = EmbeddedEngine(EngineConfig(options.model, "demo", seed=seed, dtype=options.dtype))
    job = TrainJob(
        lr=options.lr,
        ppo_epochs=options.epochs,
        batch_size=options.groups,
        clip_ratio_high=options.clip_high,
        lora_rank=options.lora_rank,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    before = await success(engine, 1000)
    started = time.perf_counter()
    rewards = await train_on_sums(engine, job, options.steps, options.siblings, seed)
    seconds = time.perf_counter() - started
    means = [statistics.mean(rewards[max(0, end - 20) : end]) for end in range(1, len(rewards) + 1)]
    reached = next(
        (step for step, mean in enumerate(means, 1) if step >= 20 and mean >= 0.95), None
    )
    after, greedy = (
        await success(engine, 1000),
        await success(engine, 300, Sampling(temperature=0, max_tokens=24)),
    )
    curve = " ".join(f"{mean:.2f}" for mean in means[19::20])
    print(
        f"seed {seed}: sampled {before:.2f} -> {after:.3f} (greedy {greedy:.2f}), {seconds:.0f} s; "
        f"mean of 20 steps at every 20th: {curve}; 0.95 at step {reached}",
        flush=True,
    )
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--clip-high", type=float, default=0.28)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    for seed in options.seeds:
        asyncio.run(_report(options, seed))


if __name__ == "__main__":
    main()
