"""A test of `fakevllm-server checkpoints export` with a checkpoint of the verl trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from contract.trainers import running
from swarm_server.backends.verl.reference import (
    assert_transformers_load,
    have_same_weights,
    on_policy_calls,
)
from typer.testing import CliRunner

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.cli.main import app
from fakevllm_server.journal.row_changes import saved
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.model_identity import identify

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_a_verl_checkpoint_is_exported_by_verls_workers(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with running("verl", run_dir, "--num-workers=1") as trainer:
        await trainer.step(on_policy_calls())
        expected = await trainer.export("expected")
        folders = CheckpointFolders(run_dir / "checkpoints")
        folder, digest = await folders.write(1, trainer.engine.save)
    journal = Journal(run_dir / "journal.sqlite")
    await journal.write(saved(SavedCheckpoint(1, folder, 1, digest, None)))
    journal.close()
    lock = RunFolder(run_dir)
    lock.record_model("verl", identify(str(DEMO_MODEL_DIR)))
    lock.close()

    model = tmp_path / "model"
    command = ["checkpoints", "export", "1", str(model), "--run-dir", str(run_dir)]
    refused = CliRunner().invoke(app, [*command, "--dtype", "float32"])
    assert refused.exit_code == 2 and "is only for the embedded trainer" in refused.stderr
    result = await asyncio.to_thread(CliRunner().invoke, app, command)

    assert result.exit_code == 0, result.output
    assert have_same_weights(model, expected)
    assert_transformers_load(model)
