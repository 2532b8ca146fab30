"""Contract tests of the verl trainer's checkpoints: those of version 0.8.0, and the export."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from contract.released_checkpoints import CALLS, JOBS, start
from swarm_server.backends.verl.reference import have_same_weights, weights_in

from fakevllm_server.backends.verl.released_checkpoint import ReleasedCheckpoint

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

RELEASED = Path(__file__).parent / "released"


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(RELEASED / f"verl-0.8.0-{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.mark.parametrize(("name", "num_workers"), [("all_weights", 3), ("adapters", 1)])
async def test_a_checkpoint_of_version_0_8_0_continues_with_another_number_of_workers(
    tmp_path: Path, name: str, num_workers: int
) -> None:
    """Two workers saved it. The next step depends on the optimizer's moments."""
    released, job = unpack(name, tmp_path), JOBS[name]
    trainer = await start(released / "model", tmp_path / "run", job, num_workers)
    try:
        await trainer.engine.restore(released / "checkpoint")
        before = await trainer.export("before")
        await trainer.step(CALLS, job)
        after = weights_in(await trainer.export("after"))
        expected = weights_in(released / "next")
        assert after.keys() == expected.keys()
        for key, value in after.items():
            assert torch.allclose(value, expected[key], rtol=0, atol=job.lr / 1000), key
        assert not have_same_weights(before, released / "next")

        again = trainer.folder / "again"
        await trainer.engine.restore(released / "checkpoint")
        await trainer.engine.save(again)
        assert not ReleasedCheckpoint.is_in(again)
        await trainer.engine.restore(again)
        assert have_same_weights(await trainer.export("converted"), before)
    finally:
        await trainer.engine.close()
