"""Helpers for tests of the engine and its parts."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.backends.embedded.decode.decoder import cache_shape
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.backends.embedded.decode.sampling_state import SamplingState
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.backends.embedded.model_folder import load_weights
from fakevllm_server.backends.embedded.train.micro_batches import StepPieces, cut_into_pieces
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.types.backend import Batch, Call, LossSpec, StepMetrics
from fakevllm_server.types.sampling import Sampling, Token

Result = TypeVar("Result")
EngineMaker = Callable[..., EmbeddedEngine]
SPEC = LossSpec.of(TrainJob())
ENDLESS = Sampling(max_tokens=250, ignore_eos=True, live=True)
CUT_DEPENDENT_METRICS = {"seconds", "rho", "tokens_computed", "tokens_saved", "forest_speedup"}
"""Metrics that depend on how a batch is cut into pieces."""


def ask(text: str) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": text}])


async def collect(stream: AsyncGenerator[list[Token]]) -> list[Token]:
    return [token async for tokens in stream for token in tokens]


def call_of(
    prompt_ids: Sequence[int], tokens: Sequence[Token], sampling: Sampling, advantage: float
) -> Call:
    return Call(
        group_id="g",
        prompt_ids=prompt_ids,
        response_ids=[token.id for token in tokens],
        logprobs=[token.logprob for token in tokens],
        version=min(token.version for token in tokens),
        temperature=sampling.temperature,
        advantage=advantage,
        weight=1.0,
    )


def load(folder: Path) -> PreTrainedModel:
    return load_weights(folder, torch.float32, torch.device("cpu"))


def sampling_state(
    model: PreTrainedModel, max_rows: int = 8, max_cells: int = 1 << 30, max_length: int = 256
) -> SamplingState:
    cache = KvCache(cache_shape(model), max_rows, max_length, max_cells)
    return SamplingState(model, cache, eos_ids=frozenset({2}))


def decode_request(
    ids: Sequence[int], limit: int, sampling: Sampling, seed: int = 0
) -> DecodeRequest:
    return DecodeRequest(list(ids), limit, sampling, random.Random(seed), stream=None)


def run_dry(state: SamplingState) -> None:
    """Run iterations until no request waits or runs."""
    with torch.inference_mode():
        while state.has_work:
            state.run_iteration()


def plain_logprobs(
    model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probabilities after each token, [tokens, vocabulary], from one pass without a
    cache."""
    network: Any = model
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return torch.log_softmax(logits / temperature, dim=-1)


def finish(step: Generator[None, None, Result]) -> Result:
    while True:
        try:
            next(step)
        except StopIteration as stop:
            return stop.value


def train(
    trainer: PolicyTrainer, calls: Sequence[Call], spec: LossSpec = SPEC, **job: Any
) -> StepMetrics:
    """Boot and run one step. The mismatch limit is off by default, because made-up calls are far
    from any model."""
    trainer.boot(TrainJob(**{"max_mismatch_k3": None, **job}))
    return finish(trainer.step(Batch(1, calls), spec))


def weights(trainer: PolicyTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def random_calls(count: int, seed: int = 0) -> list[Call]:
    """Return random calls. They are stale on purpose, so that ratios differ from 1 and some tokens
    are clipped."""
    rng = random.Random(seed)
    calls: list[Call] = []
    for index in range(count):
        prompt = [rng.randrange(7, 512) for _ in range(rng.randrange(1, 20))]
        response = [rng.randrange(7, 512) for _ in range(rng.randrange(1, 30))]
        logprobs = [-6 + rng.random() for _ in response]
        advantage = rng.choice([-1.0, 0.5, 2.0])
        temperature, weight = rng.choice([0.7, 1.0]), rng.choice([0.25, 1.0])
        calls.append(
            Call(f"g{index}", prompt, response, logprobs, 0, temperature, advantage, weight)
        )
    return calls


def with_token_advantages(calls: Sequence[Call]) -> list[Call]:
    """Give every other call an advantage per token, which falls from token to token and changes its
    sign."""
    return [
        replace(call, advantage=[value - at / 4 for at, value in enumerate(call.advantages)])
        if index % 2
        else call
        for index, call in enumerate(calls)
    ]


def pieces(
    calls: Sequence[Call], max_tokens: int, spec: LossSpec = SPEC, version: int | None = None
) -> StepPieces:
    cpu = torch.device("cpu")
    return cut_into_pieces(calls, spec, max_tokens, cpu, shares_prefixes=True, version=version)


def running_request(engine: EmbeddedEngine) -> DecodeRequest:
    return engine._state.decoder.rows[0]  # pyright: ignore[reportPrivateUsage]
