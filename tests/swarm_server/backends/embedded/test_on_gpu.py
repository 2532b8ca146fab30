"""The embedded engine on a GPU: decoding in CUDA graphs, new weights under graphs, and learning."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_server.backends.embedded.engine_helpers import (
    SPEC,
    EngineMaker,
    call_of,
    collect,
    load,
    plain_logprobs,
    random_calls,
)
from swarm_server.backends.embedded.learning_curve import success, train_on_sums

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.types.backend import Batch
from fakevllm_server.types.sampling import Sampling, Token

pytestmark = pytest.mark.gpu

SAMPLING = Sampling(max_tokens=10, ignore_eos=True)
PROMPT = [9, 10, 11]
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}
"""Largest difference between a sampled log-probability and that of a float32 forward pass on the
CPU. On CUDA, float32 products may be rounded to TF32."""


def differences(folder: Path, tokens: list[Token]) -> list[float]:
    """Compare sampled log-probabilities with those of the model folder, computed on the CPU."""
    plain = plain_logprobs(load(folder), [*PROMPT, *(token.id for token in tokens)])
    return [
        abs(token.logprob - plain[at, token.id].item())
        for at, token in enumerate(tokens, start=len(PROMPT) - 1)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_decoding_runs_in_cuda_graphs_with_the_models_log_probabilities(
    make_engine: EngineMaker, demo_folder: Path, dtype: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(demo_folder, dtype=dtype)
    tokens = await collect(engine.generate(PROMPT, SAMPLING))

    assert f"the fused forward pass in CUDA graphs, in torch.{dtype}" in capfd.readouterr().err
    assert max(differences(demo_folder, tokens)) < TOLERANCE[dtype]


async def test_graphs_decode_with_the_weights_of_the_latest_publish(
    make_engine: EngineMaker, demo_folder: Path, tmp_path: Path
) -> None:
    engine = make_engine(demo_folder, dtype="float32")
    before = await collect(engine.generate(PROMPT, SAMPLING))
    await engine.boot(TrainJob(lr=1e-3))
    await engine.step(Batch(1, [call_of(PROMPT, before, SAMPLING, 1.0)]), SPEC)
    await engine.publish(3)
    after = await collect(engine.generate(PROMPT, SAMPLING))
    await engine.export(tmp_path / "trained")

    assert {token.version for token in after} == {3}
    assert max(differences(tmp_path / "trained", after)) < TOLERANCE["float32"]
    assert max(differences(demo_folder, after)) > 2 * TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_training_on_a_gpu_raises_the_reward(
    make_engine: EngineMaker, demo_folder: Path, dtype: str
) -> None:
    engine = make_engine(demo_folder, seed=0, dtype=dtype)
    before = await success(engine, 300)

    await train_on_sums(engine, TrainJob(ppo_epochs=2, lr=4e-4), num_steps=25, num_siblings=8)

    assert await success(engine, 300) > before + 0.15


async def test_a_step_on_a_gpu_equals_the_step_on_a_cpu(
    make_engine: EngineMaker, demo_folder: Path
) -> None:
    norms: dict[str, float] = {}
    for device in ("cpu", "cuda"):
        engine = make_engine(demo_folder, device=device, dtype="float32")
        await engine.boot(TrainJob(max_mismatch_k3=None))
        metrics = await engine.step(Batch(1, random_calls(20)), SPEC)
        norms[device] = metrics["grad_norm"]

    assert norms["cuda"] == pytest.approx(norms["cpu"], rel=1e-3)


async def test_a_checkpoint_of_a_gpu_is_restored_on_a_gpu(
    make_engine: EngineMaker, demo_folder: Path, tmp_path: Path
) -> None:
    first, second = make_engine(demo_folder), make_engine(demo_folder)
    await first.boot(TrainJob(lr=1e-3))
    await first.step(Batch(1, random_calls(6)), SPEC)
    await first.save(tmp_path / "checkpoint")
    await second.boot(TrainJob(lr=1e-3))
    await second.restore(tmp_path / "checkpoint")
    for name, engine in (("first", first), ("second", second)):
        await engine.export(tmp_path / name)

    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
