"""Passes in bfloat16 over weights in float32."""

from __future__ import annotations

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
    pieces,
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
from fakevllm_server.backends.torch_forest.attention.transformers_hook import causal_model
from fakevllm_server.backends.torch_forest.autocast import compute_dtype, set_compute_dtype
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_losses.step_loss import step_loss
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
    """Return calls with duplicates, whose forest has a rho above 2."""
    return [call for call in random_calls(5) for _ in range(3)]


def flat(model: Any, calls: Sequence[Call], way: str) -> Tensor:
    """Return the log-probabilities of the trained tokens of all calls, [trained tokens]."""
    own = [CallTokens.of(call.prompt_ids, call.response_ids) for call in calls]
    plan = Plan.of(build_forest(own), model.device)
    with torch.no_grad():
        return plan.flat(edge_values(model, plan, way).log_prob).cpu()


def gradient(trainer: PolicyTrainer) -> Tensor:
    """Return the gradients of the weights that train, flat, on the CPU."""
    trained = [one for one in trainer.model.parameters() if one.requires_grad]
    return torch.cat([one.grad.flatten() for one in trained if one.grad is not None]).cpu()


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
def test_auto_is_bfloat16_only_on_cuda(name: str, device: str, expected: torch.dtype) -> None:
    assert resolve_dtype(name, torch.device(device)) is expected


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("way", ["chains", "segments", "dense", "rows"])
def test_a_bfloat16_forest_is_as_close_to_float32_as_the_bfloat16_model(
    demo_folder: Path, way: str, device: str
) -> None:
    if device == "cuda":
        way = "flex" if way == "chains" else way
    calls = family()
    exact = naive(load(demo_folder), calls)
    model = in_bf16(demo_folder, device)
    of_naive, actual = naive(model, calls), flat(model, calls, way)
    noise, ours = (of_naive - exact).abs(), (actual - exact).abs()

    assert 0 < noise.mean() < 0.05, "it does compute in bfloat16"
    assert ours.mean() < 1.5 * noise.mean() and ours.max() < 2 * noise.max()
    assert (actual - of_naive).abs().mean() < 2 * noise.mean()


def test_matrix_products_are_in_bfloat16_and_the_rest_in_float32(tiny_folder: Path) -> None:
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


def test_an_adapted_lm_head_computes_in_bfloat16(tiny_folder: Path) -> None:
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


def plain_gradient(model: Any, calls: Sequence[Call]) -> Tensor:
    """Return the gradient of the default loss, computed call by call by the model itself."""
    (piece,) = pieces(calls, 100_000).pieces
    log_probs: list[Tensor] = []
    for call in (calls[index] for index in piece.calls):
        ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / call.temperature
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        log_probs.append(chosen[len(call.prompt_ids) - 1 :])
    step_loss(torch.cat(log_probs), piece.tokens, SPEC).loss.backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("forest", [True, False])
def test_a_bfloat16_gradient_differs_from_float32_only_by_rounding(
    tiny_folder: Path, forest: bool
) -> None:
    """The limit comes from the error of the model itself under torch's autocast, since the error of
    bfloat16 kernels depends on the processor."""
    exact = plain_gradient(load(tiny_folder), family())
    with torch.autocast("cpu", BF16):
        rounding = (plain_gradient(load(tiny_folder), family()) - exact).norm()
    assert 0 < rounding < 0.2 * exact.norm(), (
        "rounding is small enough for a wrong gradient to show"
    )

    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder), BF16)
    metrics = train(trainer, family(), grad_clip=1e9, forest=forest)
    state = trainer.optimizer.state
    moments = torch.cat([state[one]["exp_avg"].flatten() for one in trainer.model.parameters()])
    error = (moments / 0.1 - exact).norm()

    assert 0 < error <= 1.5 * rounding
    assert abs(metrics["grad_norm"] - exact.norm()) <= 1.5 * rounding


def test_autocast_is_off_while_a_step_is_paused(tiny_folder: Path) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder), BF16)
    trainer.boot(TrainJob(micro_batch_tokens=1, max_mismatch_k3=None))
    spec = LossSpec(kl_loss_coef=0.1, bypass_mode=False)
    pauses = [
        torch.is_autocast_enabled("cpu") for _ in trainer.step(Batch(1, random_calls(3)), spec)
    ]
    assert len(pauses) == 9 and not any(pauses)


def test_the_reference_computes_in_the_trainers_type(tiny_folder: Path) -> None:
    """Otherwise the KL of a policy to itself would be the difference between two types."""
    references: list[Any] = []

    def reference() -> Any:
        references.append(load(tiny_folder))
        return references[-1]

    trainer = PolicyTrainer(load(tiny_folder), reference, BF16)
    spec = LossSpec(kl_loss_coef=0.1)
    metrics = train(trainer, family(), spec, max_mismatch_k3=None)
    assert metrics["kl"] == 0 and compute_dtype(references[0]) == BF16


async def test_sampler_and_trainer_compute_in_the_same_type(make_engine: EngineMaker) -> None:
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


def test_the_compute_dtype_of_the_weights_changes_nothing(tiny_folder: Path) -> None:
    model: Any = load(tiny_folder)
    before = plain_logprobs(model, range(30))
    set_compute_dtype(model, torch.float32)
    assert "forward" not in vars(causal_model(model).model)
    assert torch.equal(plain_logprobs(model, range(30)), before)
    assert compute_dtype(model) == torch.float32


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("job", [{}, {"lora_rank": 4}, {"gradient_checkpointing": True}])
def test_gradients_of_bfloat16_forest_steps_are_as_close_to_float32_as_those_of_rows(
    tmp_path: Path, device: str, job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The limit comes from the error of the rows, since the error of bfloat16 kernels depends on
    the processor."""
    folder = tmp_path / "wide"
    save_tiny_llama(folder, head_dim=16)  # CUDA's kernels for a forest need at least 16

    def gradients(on: str, dtype: torch.dtype, *, forest: bool) -> Tensor:
        """Return the gradients of two steps, flat."""
        model: Any = load(folder)
        trainer = PolicyTrainer(model.to(on), lambda: load(folder), dtype)
        kept: list[Tensor] = []
        trainer.boot(TrainJob(max_mismatch_k3=None, forest=forest, **job))
        trainer.optimizer.register_step_pre_hook(lambda *_: kept.append(gradient(trainer)))
        options: dict[str, Any] = {"lr": 1e-4, "grad_clip": 1e9, "forest": forest}
        for _ in range(2):
            rho = train(trainer, family(), **options, **job)["rho"]
            assert rho > 2 if forest else rho == 1
        assert len(kept) == 2
        return torch.cat(kept)

    exact = gradients("cpu", torch.float32, forest=False)
    rows = gradients(device, BF16, forest=False)
    shared = gradients(device, BF16, forest=True)

    rounding = (rows - exact).norm()
    assert 0 < rounding < 0.2 * exact.norm(), (
        "rounding is small enough for a wrong gradient to show"
    )
    assert (shared - exact).norm() <= 1.5 * rounding
    fallbacks = [record for record in caplog.records if record.name == "fakevllm.trainer"]
    assert not fallbacks, "no attention fell back to a slower one"
