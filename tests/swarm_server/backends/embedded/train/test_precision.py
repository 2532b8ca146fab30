"""Passes in bfloat16 over weights in float32."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    SPEC,
    EngineMaker,
    call_of,
    collect,
    finish,
    load,
    plain_logprobs,
    random_calls,
    train,
    weights,
)
from swarm_server.backends.embedded.tiny_llama import save_tiny_llama
from torch import Tensor

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.device_and_dtype import resolve_dtype
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.torch_forest.forward import edge_values
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.backends.torch_forest.precision import compute_dtype, set_compute_dtype
from fakevllm_server.backends.torch_forest.transformers_attention import causal_model
from fakevllm_server.forest import CallTokens, build_forest
from fakevllm_server.types.backend import Batch, Call, LossSpec
from fakevllm_server.types.sampling import Sampling

BF16 = torch.bfloat16
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def in_bf16(folder: Path, device: str = "cpu") -> Any:
    model: Any = load(folder)
    model.to(device)
    set_compute_dtype(model, BF16)
    return model


def family() -> list[Call]:
    """Siblings, twins and drifted ones: a forest of rho above 2."""
    return [call for call in random_calls(5) for _ in range(3)]


def flat(model: Any, calls: Sequence[Call], way: str) -> Tensor:
    """[trained tokens]"""
    own = [CallTokens.of(call.prompt_ids, call.response_ids) for call in calls]
    plan = Plan.of(build_forest(own), model.device)
    with torch.no_grad():
        return plan.flat(edge_values(model, plan, way).log_prob).cpu()


def naive(model: Any, calls: Sequence[Call]) -> Tensor:
    rows: list[Tensor] = []
    for call in calls:
        ids = torch.tensor([[*call.prompt_ids, *call.response_ids]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        rows.append(chosen[len(call.prompt_ids) - 1 :])
    return torch.cat(rows).cpu()


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cuda", torch.bfloat16),
        ("auto", "cpu", torch.float32),
        ("auto", "mps", torch.float32),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_on_cuda_alone(name: str, device: str, expected: torch.dtype) -> None:
    assert resolve_dtype(name, torch.device(device)) is expected


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("way", ["chains", "segments", "dense", "rows"])
def test_a_forest_is_as_near_to_float32_as_the_model_itself_is(
    demo_folder: Path, way: str, device: str
) -> None:
    if device == "cuda":
        way = "flex" if way == "chains" else way
    calls = family()
    exact = naive(load(demo_folder), calls)
    model = in_bf16(demo_folder, device)
    of_naive, found = naive(model, calls), flat(model, calls, way)
    noise, ours = (of_naive - exact).abs(), (found - exact).abs()

    assert 0 < noise.mean() < 0.05, "it does compute in bfloat16"
    assert ours.mean() < 1.5 * noise.mean() and ours.max() < 2 * noise.max()
    assert (found - of_naive).abs().mean() < 2 * noise.mean()


def test_products_are_in_bfloat16_and_all_behind_them_in_float32(tiny_folder: Path) -> None:
    model = in_bf16(tiny_folder)
    seen: dict[str, set[torch.dtype]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        module.register_forward_hook(
            lambda _, __, out, kind=kind: (
                seen.setdefault(kind, set()).add(out.dtype) if isinstance(out, Tensor) else None
            )
        )
        assert name is not None
    plan = Plan.of(build_forest([CallTokens.of([1, 2], [3, 4])]))
    values = edge_values(model, plan, "chains", with_entropy=True)
    assert seen["Linear"] == {BF16} and seen["LlamaRMSNorm"] == {torch.float32}
    assert values.log_prob.dtype == torch.float32
    assert values.entropy is not None and values.entropy.dtype == torch.float32


def test_an_adapted_lm_head_computes_in_it_too(tiny_folder: Path) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder), BF16)
    trainer.boot(TrainJob(lora_rank=4, target_modules="lm_head"))
    seen: list[torch.dtype] = []
    for name in ("base_layer", "lora_A.default", "lora_B.default"):
        layer = trainer.model.get_submodule(f"lm_head.{name}")
        layer.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    trainer.model.get_submodule("lm_head")(torch.zeros(1, 32))
    assert seen == [BF16] * 3


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4, "target_modules": "q_proj,lm_head"}])
def test_weights_gradients_and_moments_stay_in_float32(
    tiny_folder: Path, lora: dict[str, Any]
) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder), BF16)
    trainer.boot(TrainJob(max_mismatch_k3=None, **lora))
    before = weights(trainer)
    grads: set[torch.dtype] = set()
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: grads.update(
            one.grad.dtype for one in optimizer.param_groups[0]["params"]
        )
    )
    finish(trainer.step(Batch(1, family()), SPEC))

    moments = {one.dtype for state in trainer.optimizer.state.values() for one in state.values()}
    assert {one.dtype for one in trainer.model.parameters()} == grads == moments == {torch.float32}
    moved = (weights(trainer) - before).abs().max()
    assert 0 < moved < 1e-5, "smaller than a bfloat16 weight can move"


def test_a_gradient_is_that_of_float32_but_for_rounding(tiny_folder: Path) -> None:
    norms: list[float] = []
    found: list[Tensor] = []
    for dtype in (torch.float32, BF16):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder), dtype)
        metrics = train(trainer, family(), lr=1e-3, max_mismatch_k3=None)
        norms.append(metrics["grad_norm"])
        state = trainer.optimizer.state
        found.append(
            torch.cat([state[one]["exp_avg"].flatten() for one in trainer.model.parameters()])
        )
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert 0 < (found[0] - found[1]).norm() < 0.1 * found[0].norm()


def test_sampling_in_the_pauses_of_a_step_is_left_alone(tiny_folder: Path) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder), BF16)
    trainer.boot(TrainJob(micro_batch_tokens=1, max_mismatch_k3=None))
    spec = LossSpec(kl_loss_coef=0.1, bypass_mode=False)
    pauses = [
        torch.is_autocast_enabled("cpu") for _ in trainer.step(Batch(1, random_calls(3)), spec)
    ]
    assert len(pauses) == 9 and not any(pauses)


def test_the_reference_computes_in_the_same_type(tiny_folder: Path) -> None:
    """Or the KL of a policy to itself would be that of two types."""
    references: list[Any] = []

    def reference() -> Any:
        references.append(load(tiny_folder))
        return references[-1]

    trainer = PolicyTrainer(load(tiny_folder), reference, BF16)
    spec = LossSpec(kl_loss_coef=0.1)
    metrics = train(trainer, family(), spec, max_mismatch_k3=None)
    assert metrics["kl"] == 0 and compute_dtype(references[0]) == BF16


async def test_sampler_and_trainer_compute_in_one_type(make_engine: EngineMaker) -> None:
    engine = make_engine(dtype="bfloat16")
    job = TrainJob(lr=1e-2, lora_rank=4)
    await engine.boot(job)
    assert engine._state.model.dtype == BF16 and engine._trainer is not None
    assert compute_dtype(engine._trainer.model) == BF16
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    for number in range(2):
        prompts = [[9, 10, 11 + index] for index in range(6)]
        replies = [await collect(engine.generate(ids, sampling)) for ids in prompts]
        calls = [
            call_of(ids, tokens, sampling, (-1.0) ** index)
            for index, (ids, tokens) in enumerate(zip(prompts, replies, strict=True))
        ]
        metrics = await engine.step(Batch(number, calls), SPEC)
        assert 0 < metrics["mismatch"] < 0.1, "of bfloat16's rounding"
        await engine.publish(number + 1)


def test_nothing_changes_where_the_weights_are_of_that_type(tiny_folder: Path) -> None:
    model: Any = load(tiny_folder)
    before = plain_logprobs(model, range(30))
    set_compute_dtype(model, torch.float32)
    assert "forward" not in vars(causal_model(model).model)
    assert torch.equal(plain_logprobs(model, range(30)), before)
    assert compute_dtype(model) == torch.float32


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("job", [{}, {"lora_rank": 4}, {"gradient_checkpointing": True}])
def test_shared_steps_in_bfloat16_are_those_in_float32_but_for_rounding(
    tmp_path: Path, device: str, job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "wide"
    save_tiny_llama(folder, head_dim=16)  # CUDA's kernels for a forest take no less
    norms: list[float] = []
    for on, dtype, shares in (("cpu", torch.float32, False), (device, BF16, True)):
        model: Any = load(folder)
        trainer = PolicyTrainer(model.to(on), lambda: load(folder), dtype)
        told = [
            train(trainer, family(), lr=1e-4, max_mismatch_k3=None, forest=shares, **job)
            for _ in range(2)
        ]
        assert all(one["rho"] > 2 if shares else one["rho"] == 1 for one in told)
        norms.append(statistics.mean(one["grad_norm"] for one in told))
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    told_of_ways = [one for one in caplog.records if one.name == "fakevllm.trainer"]
    assert not told_of_ways, "no way fell back to a slower one"
