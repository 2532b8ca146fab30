"""In bfloat16, adapters reach the sampler unmerged, and therefore unrounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    SPEC,
    EngineMaker,
    call_of,
    collect,
    load,
    plain_logprobs,
    random_calls,
    train,
)
from torch import Tensor

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.backends.embedded.lora_model import adapter_view, needs_adapter_view
from fakevllm_server.backends.embedded.train.gradient_checkpointing import (
    set_gradient_checkpointing,
)
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.embedded.weights import MergedWeights, adapters_of, named_weights
from fakevllm_server.types.backend import Batch, Call
from fakevllm_server.types.sampling import Sampling, Token

LORA: dict[str, Any] = {"lora_rank": 4, "max_mismatch_k3": None}
BF16 = torch.bfloat16
IDS = range(7, 40)
SEEDED = Sampling(max_tokens=30, ignore_eos=True, seed=0)
SMALL = 6e-4
"""Standard deviation of an adapter's B, whose product with A then has entries of about 1e-4."""


def set_adapters(model: Any, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for adapter in adapters_of(model).values():
        weight = adapter.lora_B["default"].weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * size)


def adapted(folder: Path, **job: Any) -> PolicyTrainer:
    trainer = PolicyTrainer(load(folder), lambda: load(folder), BF16)
    trainer.boot(TrainJob(**LORA, **job))
    set_adapters(trainer.model, 0.05)
    return trainer


async def engine_with(make_engine: EngineMaker, size: float, **settings: Any) -> EmbeddedEngine:
    engine = make_engine(dtype="bfloat16", **settings)
    await engine.boot(TrainJob(**LORA))
    assert engine._trainer is not None
    set_adapters(engine._trainer.model, size)
    await engine.publish(1)
    return engine


async def sampled(engine: EmbeddedEngine, count: int) -> list[Call]:
    async def one(ids: list[int]) -> Call:
        sampling = Sampling(max_tokens=40, ignore_eos=True, seed=ids[-1])
        return call_of(ids, await collect(engine.generate(ids, sampling)), sampling, 1.0)

    return list(await asyncio.gather(*[one([9, 10, 11 + at]) for at in range(count)]))


async def log_probs(engine: EmbeddedEngine, calls: list[Call], policy: Any) -> Tensor:
    rows = await engine.log_probs(calls, policy)
    return torch.tensor([value for row in rows for value in row])


def response_log_probs(model: Any, call: Call) -> Tensor:
    """Return the log-probabilities of the call's response by one plain forward pass."""
    plain = plain_logprobs(model, [*call.prompt_ids, *call.response_ids])
    ids = torch.tensor(call.response_ids)[:, None]
    return plain[len(call.prompt_ids) - 1 : -1].gather(1, ids)[:, 0]


async def test_an_adapter_smaller_than_the_weights_rounding_changes_sampled_log_probs(
    make_engine: EngineMaker, demo_folder: Path
) -> None:
    engine = await engine_with(make_engine, SMALL, model=demo_folder)
    assert engine._trainer is not None
    base, merged = load(demo_folder), MergedWeights(engine._trainer.model)
    moved = [
        (merged[name].to(BF16) != weight.to(BF16)).float().mean().item()
        for name, weight in named_weights(base).items()
        if name.endswith("_proj.weight")
    ]
    assert max(moved) < 0.8, "rounded into the weights a part of it would be lost"

    calls = await sampled(engine, 24)

    sampled_log_probs = torch.tensor([value for call in calls for value in call.logprobs])
    trained, start = [await log_probs(engine, calls, one) for one in ("trained", "reference")]
    effect = (trained - start).abs().mean()
    assert effect > 1e-3
    assert (sampled_log_probs - trained).abs().mean() < effect / 3


async def test_a_step_does_not_change_the_sampler_until_the_next_publish(
    make_engine: EngineMaker,
) -> None:
    engine = await engine_with(make_engine, 0.02)

    async def reply() -> list[tuple[int, float]]:
        tokens: list[Token] = await collect(engine.generate([9, 10, 11], SEEDED))
        return [(token.id, token.logprob) for token in tokens]

    await reply()  # later answers take the prompt from the cache, and so have the same rounding
    before = await reply()
    await engine.boot(TrainJob(**LORA, lr=1e-2))
    await engine.step(Batch(1, random_calls(6)), SPEC)
    assert await reply() == before
    await engine.publish(2)
    assert await reply() != before


async def test_loading_weights_from_a_folder_leaves_the_trainers_weights_alone(
    make_engine: EngineMaker, tiny_folder: Path
) -> None:
    engine = await engine_with(make_engine, 0.02)
    assert engine._trainer is not None
    kept = {name: one.clone() for name, one in named_weights(engine._trainer.model).items()}
    await engine.load_weights(tiny_folder, 2)

    own = named_weights(engine._trainer.model)
    assert all(torch.equal(own[name], kept[name]) for name in kept)
    calls = await sampled(engine, 2)
    fresh = make_engine(dtype="bfloat16")
    assert [call.logprobs for call in calls] == [call.logprobs for call in await sampled(fresh, 2)]
    await engine.publish(3)
    assert [call.logprobs for call in await sampled(engine, 2)] != [call.logprobs for call in calls]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_an_adapter_view_computes_like_the_trainers_model_and_shares_its_weights(
    demo_folder: Path, gradient_checkpointing: bool
) -> None:
    trainer = adapted(demo_folder, gradient_checkpointing=gradient_checkpointing)
    made = adapter_view(trainer.model)
    before = plain_logprobs(trainer.model, IDS)

    assert torch.equal(plain_logprobs(made, IDS), before)
    of_trainer, of_view = named_weights(trainer.model), named_weights(made)
    assert of_trainer.keys() == of_view.keys(), "tied weights stay tied"
    shared = {n for n in of_view if of_view[n].data_ptr() == of_trainer[n].data_ptr()}
    assert shared == {name for name in of_view if ".lora_" not in name}
    assert not any(one.requires_grad for one in made.parameters())
    assert not set_gradient_checkpointing(made, False), "it is not marked as what it is not"
    train(trainer, random_calls(3), lr=1e-2, **LORA)
    assert torch.equal(plain_logprobs(made, IDS), before)
    assert not torch.equal(plain_logprobs(trainer.model, IDS), before)


def test_only_adapters_in_another_type_need_an_adapter_view(tiny_folder: Path) -> None:
    assert needs_adapter_view(adapted(tiny_folder).model)
    plain = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder), BF16)
    plain.boot(TrainJob())
    exact = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
    exact.boot(TrainJob(**LORA))
    assert not needs_adapter_view(plain.model) and not needs_adapter_view(exact.model)


async def test_layers_with_gradient_checkpointing_decode_with_their_cache(
    make_engine: EngineMaker, tiny_folder: Path
) -> None:
    engine = make_engine(dtype="bfloat16")
    await engine.boot(TrainJob(**LORA, gradient_checkpointing=True))
    await engine.publish(1)
    calls = await sampled(engine, 4)
    sampled_log_probs = torch.tensor([value for call in calls for value in call.logprobs])
    trained = await log_probs(engine, calls, "trained")
    exact = torch.cat([response_log_probs(load(tiny_folder), call) for call in calls])
    rounding = (sampled_log_probs - exact).abs().mean()
    assert 0 < rounding < 0.1
    # Sampler and trainer compute the same products, so they differ by less than their rounding.
    assert (sampled_log_probs - trained).abs().mean() < 0.2 * rounding
