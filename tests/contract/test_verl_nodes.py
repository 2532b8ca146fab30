"""Contract tests of the verl trainer in a Ray cluster of several nodes. The nodes are on this
machine, and each of them has one worker on the CPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from contract.ray_nodes import RayNodes, ray_nodes
from contract.trainers import JOB, Subject, running
from swarm_server.backends.verl.reference import Reference, have_same_weights, on_policy_calls

from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

CALLS = on_policy_calls(3, mixed=True)
LOST = "exited with code 70"


@pytest.fixture(scope="module")
def nodes() -> Generator[RayNodes]:
    with ray_nodes(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def environment(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what the trainer needs to join the cluster, and to train on CPUs there."""
    for name, value in nodes.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


async def test_more_workers_than_the_cluster_has_gpus_are_refused(
    nodes: RayNodes, tmp_path: Path
) -> None:
    message = "4 workers do not fit: .* GPUs of the nodes are 1, 1; lower cluster.training_gpus"
    with pytest.raises(BackendRefused, match=message):
        async with running("verl", tmp_path, *arguments(nodes, 4)):
            pass
    message = "Ray has 1 GPUs on this machine, and the section cluster leaves 0 of them to train: "
    with pytest.raises(BackendRefused, match=message):
        async with running("verl", tmp_path, *arguments(nodes, 1), "--max-local-gpus=0"):
            pass


async def test_training_goes_on_with_the_workers_that_are_left_when_a_node_dies_in_a_step(
    nodes: RayNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reference, saved = Reference(JOB), tmp_path / "saved"
    options = [*arguments(nodes, 2), "--min-workers=1"]
    async with running("verl", tmp_path / "nodes", *options) as trainer:
        for _ in range(2):
            reference.step(CALLS)
            await trainer.step(CALLS)
        # Workers on several nodes gather each weight before it is written.
        reference.assert_same_weights(await trainer.export("gathered"))
        await trainer.engine.save(saved)
        assert "workers, because" not in caplog.text

        os.kill(nodes.worker(2), signal.SIGSTOP)  # The step cannot end before the node dies.
        step = asyncio.ensure_future(lost_in_step(trainer))
        assert not (await asyncio.wait({step}, timeout=2))[0]
        nodes.kill(2)
        assert LOST in await step
        await continue_from(trainer, saved)
        assert "trains with 1 of 2 workers, because" in caplog.text
        for _ in range(2):
            await trainer.step(CALLS)
        continued = await trainer.export("continued")

    async with running("verl", tmp_path / "alone", "--num-workers=1") as alone:
        await alone.engine.restore(saved)
        for _ in range(2):
            await alone.step(CALLS)
        assert have_same_weights(continued, await alone.export("alone"))


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_training_on_four_nodes_goes_on_after_a_worker_froze_and_after_a_node_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reference, saved = Reference(JOB), tmp_path / "saved"
    with ray_nodes(4) as nodes:
        for name, value in nodes.environ.items():
            monkeypatch.setenv(name, value)
        options = [*arguments(nodes, 4), "--min-workers=2", "--collective-timeout=20"]
        async with running("verl", tmp_path / "nodes", *options) as trainer:
            reference.step(CALLS)
            await trainer.step(CALLS)
            await trainer.engine.save(saved)

            os.kill(nodes.worker(3), signal.SIGSTOP)
            assert LOST in await lost_in_step(trainer)
            await continue_from(trainer, saved)
            assert "workers, because" not in caplog.text

            nodes.kill(4)
            assert LOST in await lost_in_step(trainer)
            await continue_from(trainer, saved)
            assert "trains with 3 of 4 workers, because" in caplog.text
            reference.step(CALLS)
            await trainer.step(CALLS)
            reference.assert_same_weights(await trainer.export("continued"))


async def test_a_node_that_cannot_import_this_project_is_named_before_workers_start(
    nodes: RayNodes, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['fakevllm_server'] = None\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    number = nodes.add({"PYTHONPATH": path})
    message = (
        rf"Ray node 127\.0\.0\.{number} cannot import what a worker needs \(.*fakevllm_server.*\): "
        "install this project on it"
    )
    with pytest.raises(BackendRefused, match=message):
        async with running("verl", tmp_path / "run", *arguments(nodes, 1)):
            pass


def arguments(nodes: RayNodes, num_workers: int) -> list[str]:
    return [f"--ray-address={nodes.address}", f"--num-workers={num_workers}"]


async def lost_in_step(trainer: Subject) -> str:
    """Make a step during which workers are lost, and return what happened to the trainer."""
    with pytest.raises(BackendError, match="did not answer step") as failed:
        await trainer.step(CALLS)
    assert not isinstance(failed.value, ActionFailed)
    return await trainer.engine.lost()


async def continue_from(trainer: Subject, checkpoint: Path) -> None:
    await trainer.engine.launch()
    await trainer.engine.restore(checkpoint)
    await trainer.engine.boot(JOB)
