"""Contract tests of the trainers: every loss that a job can name has the same gradient in verl's
trainer as in the embedded one, with any number of workers."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from contract.loss_cases import LossCase, batch_of, pairwise_cases
from contract.trainers import Subject, running
from swarm_server.backends.verl.reference import Reference

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.types.backend import LossSpec

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
OF_SHARING = {"token_fidelity", "rho", "tokens_computed", "tokens_saved", "forest_speedup"}
"""Metrics of calls that share prefixes. They do not depend on the loss."""
ALONE: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"preference_beta": 0.3},
    "kto": {"preference_beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Subject]:
    """The verl trainer with some number of workers, for all cases with this number."""
    folder = tmp_path_factory.mktemp("workers")
    async with running("verl", folder, "--num-workers", str(request.param)) as subject:
        await subject.engine.save(folder / "untouched")
        yield subject


@pytest.mark.parametrize(
    ("workers", "case"),
    [
        pytest.param(case.num_workers, case, id=f"{case.num_workers}-{case.id}")
        for case in sorted(pairwise_cases(), key=lambda case: case.num_workers)
    ],
    indirect=["workers"],
)
async def test_verl_trains_every_loss_as_the_embedded_trainer_does(
    workers: Subject, case: LossCase
) -> None:
    await assert_same_updates(workers, case.settings)


@pytest.mark.parametrize("loss", ALONE)
@pytest.mark.parametrize("workers", [2], indirect=True)
async def test_verl_trains_demonstrations_alone_as_the_embedded_trainer_does(
    workers: Subject, loss: str
) -> None:
    await assert_same_updates(workers, {"loss": loss, **ALONE[loss]})


async def assert_same_updates(workers: Subject, settings: dict[str, Any]) -> None:
    """Make two updates of the weights with both trainers, and compare metrics and weights."""
    job = TrainJob.model_validate({"lr": 1e-4, "ppo_epochs": 2} | settings)
    if LossSpec.of(job).has_policy_loss:
        job = job.model_copy(update={"max_mismatch_k3": None})
    batch = batch_of(job)
    await workers.engine.restore(workers.folder / "untouched")
    await workers.engine.boot(job)
    reference = Reference(job)

    expected = reference.step_of(batch)
    metrics = await workers.engine.step(batch, LossSpec.of(job))

    compared = metrics.keys() - OF_SHARING
    assert compared == expected.keys() - OF_SHARING
    assert expected["grad_norm"] > 1e-3 and math.isfinite(expected["loss"])
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6, rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name in compared - {"seconds", "loss", "grad_norm"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    reference.assert_same_weights(await workers.export("stepped"))
