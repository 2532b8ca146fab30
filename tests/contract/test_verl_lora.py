"""Contract tests of the verl trainer with LoRA, compared with the embedded trainer.

The trainer has two workers. It also runs with gradient checkpointing, which changes no result, and
with CPU offload, which moves nothing on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from contract.trainers import Subject, running
from swarm_server.backends.verl.reference import (
    Reference,
    assert_transformers_load,
    demo_model,
    have_same_weights,
    on_policy_calls,
    stale,
    weights_in,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.verl.trainer_arguments import (
    arguments_for_checkpoint,
    arguments_for_job,
)
from fakevllm_server.types.backend import BackendRefused, StepMetrics

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

JOB = TrainJob(
    lr=1e-2,
    max_mismatch_k3=None,
    lora_rank=3,
    lora_alpha=12,
    seed=5,
    kl_loss_coef=0.5,
    gradient_checkpointing=True,
)
"""The job of the tests. Its rank cannot be divided by the number of workers."""
PREFIX = "base_model.model."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Subject]:
    arguments = ["--num-workers=2", "--cpu-offload", *arguments_for_job(JOB)]
    folder = tmp_path_factory.mktemp("lora")
    async with running("verl", folder, *arguments, job=JOB) as subject:
        yield subject


async def test_two_updates_of_adapters_are_those_of_the_embedded_trainer(trainer: Subject) -> None:
    calls = stale(on_policy_calls(5, mixed=True, shared_tokens=40))
    reference = Reference(JOB)
    folder = trainer.folder
    first = await exported_adapters(trainer, "first")
    expected_first = reference.export_adapters(folder / "expected_first", "trained")
    assert first.keys() == expected_first.keys()
    assert all(torch.equal(value, expected_first[name]) for name, value in first.items())
    zero = await exported_adapters(trainer, "zero", "reference")
    assert all(not value.any() for name, value in zero.items() if "lora_B" in name)
    # The reference policy is computed first, while the adapters of the workers are switched off.
    before = await trainer.engine.log_probs(calls, "reference")
    await trainer.engine.save(folder / "untouched")

    metrics: StepMetrics = {}
    for _ in range(2):
        metrics, expected = await trainer.step(calls, JOB), reference.step(calls)
        for name in ("loss", "grad_norm", "approx_kl", "entropy"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-3, abs=1e-6)

    assert metrics["kl"] > 1e-3
    assert metrics["rho"] > 1.5
    assert await trainer.engine.log_probs(calls, "reference") == before
    assert await trainer.engine.log_probs(calls, "trained") != before
    adapters = await exported_adapters(trainer, "adapters")
    expected_adapters = reference.export_adapters(folder / "expected", "trained")
    for name, value in adapters.items():
        assert torch.allclose(value, expected_adapters[name], atol=JOB.lr / 10), name
    config = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    assert config == json.loads((folder / "expected" / "adapter_config.json").read_text())


async def test_exported_weights_are_the_base_plus_the_scaled_adapters(trainer: Subject) -> None:
    await trainer.step(stale(on_policy_calls(4)), JOB)
    adapters = await exported_adapters(trainer, "factors")
    weights = weights_in(await trainer.export("merged"))

    base = dict(demo_model().named_parameters())
    assert weights.keys() == base.keys()
    scale = JOB.lora_alpha / JOB.lora_rank
    adapted = 0
    for name, weight in weights.items():
        layer = PREFIX + name.removesuffix(".weight")
        expected = base[name].detach()
        if f"{layer}.lora_A.weight" in adapters:
            product = adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
            assert product.abs().max() > 1e-4, name
            expected = expected + scale * product
            adapted += 1
        assert torch.allclose(weight, expected, rtol=0, atol=1e-6), name
    assert adapted == len(adapters) / 2 == 7 * 3
    assert_transformers_load(trainer.folder / "merged")


async def test_a_checkpoint_holds_the_adapters_and_continues_with_the_same_step(
    trainer: Subject,
) -> None:
    calls, saved = stale(on_policy_calls(4)), trainer.folder / "saved"
    await trainer.step(calls, JOB)
    await trainer.engine.save(saved)
    uninterrupted = await trainer.step(calls, JOB)
    expected = await trainer.export("uninterrupted")

    await trainer.step(stale(calls), JOB)
    await trainer.engine.restore(saved)
    await trainer.engine.boot(JOB)
    again = await trainer.step(calls, JOB)

    assert again | {"seconds": 0} == uninterrupted | {"seconds": 0}
    assert have_same_weights(await trainer.export("again"), expected)
    adapters = weights_in(saved / "adapters")  # for versions that vLLM holds as adapters
    await trainer.engine.restore(saved)
    exported = await exported_adapters(trainer, "restored")
    assert adapters.keys() == exported.keys()
    assert all(torch.equal(value, exported[name]) for name, value in adapters.items())
    tensors = FileSystemReader(saved / "state").read_metadata().state_dict_metadata
    weights = [name for name in tensors if name.startswith("weights.")]
    assert weights and all("lora_" in name for name in weights)
    *_, rank, alpha, targets = arguments_for_checkpoint(saved)
    assert [rank, alpha, targets] == arguments_for_job(JOB)[:3]


async def test_a_job_or_a_checkpoint_with_other_adapters_is_refused(trainer: Subject) -> None:
    other = JOB.model_copy(update={"lora_rank": 8})
    message = "was started with lora_rank = 3, .*, and the job has lora_rank = 8.*start it with"
    with pytest.raises(BackendRefused, match=message):
        await trainer.engine.boot(other)
    saved = trainer.folder / "other"
    await trainer.engine.save(saved)
    (saved / "lora.json").unlink()
    with pytest.raises(BackendRefused, match="has lora_rank = 0, and the verl trainer was started"):
        await trainer.engine.restore(saved)
    await trainer.engine.boot(JOB)


async def test_target_modules_that_the_model_lacks_are_refused_before_workers_start(
    tmp_path: Path,
) -> None:
    job = JOB.model_copy(update={"target_modules": "q_prj"})
    with pytest.raises(BackendRefused, match="target_modules names 'q_prj', no linear layer"):
        async with running("verl", tmp_path, *arguments_for_job(job), job=job):
            pass


async def exported_adapters(
    trainer: Subject, name: str, policy: Any = "trained"
) -> dict[str, torch.Tensor]:
    folder = trainer.folder / name
    await trainer.engine.export_adapters(folder, policy)
    return weights_in(folder)
