"""`fakevllm-server checkpoints export` of checkpoints of the embedded trainer."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import EngineMaker, load
from swarm_server.backends.embedded.lora_helpers import LORA, trained
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from fakevllm_server.backends.embedded.train import checkpoint
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.cli.main import app
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal.row_changes import saved
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.model_identity import identify

pytestmark = pytest.mark.slow

IDS = torch.tensor([list(range(7, 60))])
ALL_WEIGHTS: dict[str, Any] = {"lora_rank": 0}


def run_of(run_dir: Path, model: Path, *trainers: PolicyTrainer) -> Path:
    """Write a run directory with a checkpoint of each trainer, as a server does. The first is the
    best."""

    async def save() -> None:
        journal = Journal(run_dir / "journal.sqlite")
        folders = CheckpointFolders(run_dir / "checkpoints")
        for step, trainer in enumerate(trainers, start=1):

            async def write(folder: Path, trainer: PolicyTrainer = trainer) -> None:
                checkpoint.save(folder, trainer, random.Random(0))

            folder, digest = await folders.write(step, write)
            await journal.write(saved(SavedCheckpoint(step, folder, step, digest, 1 / step)))
        journal.close()

    folder = RunFolder(run_dir)
    folder.record_model("embedded", identify(str(model)))
    asyncio.run(save())
    folder.close()
    return run_dir


def export(run_dir: Path, *arguments: str | int | Path) -> Result:
    command = ["checkpoints", "export", *map(str, arguments), "--run-dir", str(run_dir)]
    return CliRunner().invoke(app, command)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def exported(folder: Path) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("job", [ALL_WEIGHTS, LORA], ids=["full", "lora"])
def test_an_exported_checkpoint_is_the_trained_model(
    tiny_folder: Path, tmp_path: Path, make_engine: EngineMaker, job: dict[str, Any]
) -> None:
    trainer = trained(tiny_folder, **job)
    run_dir = run_of(tmp_path / "run", tiny_folder, trainer)

    result = export(run_dir, 1, tmp_path / "model")

    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["dtype"] == "float32"
    model = exported(tmp_path / "model")
    assert torch.allclose(logits(model), logits(trainer.model), atol=1e-4)
    assert not torch.allclose(logits(model), logits(load(tiny_folder)), atol=1e-2)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in load(tiny_folder).named_parameters()]
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    ServerConfig("embedded", tmp_path / "next", model=str(tmp_path / "model"))
    assert make_engine(tmp_path / "model").model_name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_the_best_checkpoint_is_exported_in_the_requested_type(
    tiny_folder: Path, tmp_path: Path
) -> None:
    better, newer = trained(tiny_folder, 1, **LORA), trained(tiny_folder, 2, **LORA)
    run_dir = run_of(tmp_path / "run", tiny_folder, better, newer)
    (tmp_path / "model").mkdir()  # empty: as good as none

    result = export(run_dir, "--best", tmp_path / "model", "--dtype", "bfloat16")

    assert result.exit_code == 0, result.output
    assert "Step 1 is exported" in result.stdout
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    assert torch.allclose(logits(exported(tmp_path / "model")), logits(better.model), atol=0.5)


def test_a_damaged_checkpoint_is_not_exported(tiny_folder: Path, tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", tiny_folder, trained(tiny_folder, 1, **LORA))
    weights = run_dir / "checkpoints/step-00000001/weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")

    result = export(run_dir, 1, tmp_path / "model")

    assert result.exit_code == 2
    assert "is damaged (its files are not those that were written)" in result.stderr
    assert not (tmp_path / "model").exists()


def test_an_export_needs_the_new_path_of_a_moved_model_and_refuses_another_model(
    tiny_folder: Path, demo_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "before"
    checkpoint.export(model, load(tiny_folder), torch.float32, tiny_folder)
    run_dir = run_of(tmp_path / "run", model, trained(tiny_folder, 1, **LORA))
    moved = model.rename(tmp_path / "after")

    result = export(run_dir, 1, tmp_path / "model")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "does not exist any more: set --model to its new path" in result.stderr
    result = export(run_dir, 1, tmp_path / "model", "--model", demo_folder)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "is not the model that this run trains" in result.stderr
    assert export(run_dir, 1, tmp_path / "model", "--model", moved).exit_code == 0


def test_a_checkpoint_that_the_trainer_refuses_leaves_no_folder_behind(
    tiny_folder: Path, demo_folder: Path, tmp_path: Path
) -> None:
    """The folder has the weight names and sizes of the run's model, but other values."""
    run_dir = run_of(tmp_path / "run", tiny_folder, trained(demo_folder, 1, **LORA))

    result = export(run_dir, 1, tmp_path / "model")

    assert result.exit_code == 1
    assert "Step 1 cannot be exported: restore: BackendError: checkpoint" in result.stderr
    assert "is of another model than --model" in result.stderr
    assert (run_dir / "export.log").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
