"""Measure the model's accuracy on fixed questions. The answers are sampled at temperature 1 with
fixed seeds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai

from fakevllm.hooks.loader import load_hooks
from fakevllm.hooks.spec import Sibling
from fakevllm_adapters.protocol.swarm import Task

NUM_SAMPLES = 200
CONCURRENCY = 32
MAX_TOKENS = 24
SEED = 2024
"""Random seed that selects the questions. It is constant, so that every run measures the same
questions."""
MAX_RETRIES = 60
"""Maximum number of retries, one every two seconds, while the server restarts after a crash. The
probe itself must retry, because it sends its calls directly to the server, and not through the
proxy, which would retry them."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one probe, which is one measurement of the model's accuracy."""

    success: float
    """Share of right answers."""
    samples: list[tuple[str, str, bool]]
    """One (question, answer, is right) per sample."""


async def probe(
    url: str,
    model: str,
    tasks: Sequence[Task],
    on_sample: Callable[[], None],
    num_samples: int = NUM_SAMPLES,
) -> Probe:
    """Request answers to the fixed questions from the swarm server at `url`, score the answers, and
    return the result.

    The server records a call for training only if the call belongs to an episode or to a group.
    These requests belong to neither, so they are not trained.
    """
    rng = random.Random(SEED)
    chosen = [rng.choice(tasks) for _ in range(num_samples)]
    slots = asyncio.Semaphore(CONCURRENCY)
    reward = load_hooks(Path(__file__).parent / "hooks").reward
    async with openai.AsyncOpenAI(
        base_url=url, api_key="sk-probe", max_retries=MAX_RETRIES
    ) as client:

        async def sample(seed: int, task: Task) -> tuple[str, str, bool]:
            async with slots:
                reply = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": task.main_query}],
                    temperature=1.0,
                    seed=seed,
                    max_tokens=MAX_TOKENS,
                )
            on_sample()
            choice = reply.choices[0]
            message = choice.message.model_dump() | {"finish_reason": choice.finish_reason}
            sibling = Sibling(0, task, "probe/0", choice.finish_reason)
            scores = reward([sibling], [message], task.main_query)
            return task.main_query, choice.message.content or "", scores[0] == 1.0

        samples = list(await asyncio.gather(*map(sample, range(num_samples), chosen)))
    return Probe(sum(right for _, _, right in samples) / len(samples), samples)
