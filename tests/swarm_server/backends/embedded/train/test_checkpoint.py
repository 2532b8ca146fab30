from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from swarm_server.backends.embedded.engine_helpers import load, random_calls, train, weights

from fakevllm_server.backends.embedded.model_folder import open_model_folder
from fakevllm_server.backends.embedded.train import checkpoint
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.types.backend import BackendError


def new_trainer(folder: Path) -> PolicyTrainer:
    return PolicyTrainer(load(folder), lambda: load(folder))


def step(trainer: PolicyTrainer, number: int) -> None:
    train(trainer, random_calls(6, seed=number), lr=1e-3, ppo_epochs=2, weight_decay=0.01)


def test_a_restored_trainer_continues_bit_equal(tiny_folder: Path, tmp_path: Path) -> None:
    straight = new_trainer(tiny_folder)
    for number in range(3):
        step(straight, number)

    first, second = new_trainer(tiny_folder), new_trainer(tiny_folder)
    step(first, 0)
    checkpoint.save(tmp_path / "c", first, random.Random(0))
    checkpoint.restore(tmp_path / "c", second, random.Random(1))
    for number in (1, 2):
        step(second, number)

    assert torch.equal(weights(second), weights(straight))


def test_a_trainer_restored_without_optimizer_state_does_not_continue_bit_equal(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """This guards the test above, which would pass without saved moments if they had no effect."""
    first, second, third = (new_trainer(tiny_folder) for _ in range(3))
    step(first, 0)
    checkpoint.save(tmp_path / "c", first, random.Random(0))
    checkpoint.restore(tmp_path / "c", second, random.Random(0))
    checkpoint.restore(tmp_path / "c", third, random.Random(0))
    third.optimizer.state.clear()
    for trainer in (second, third):
        step(trainer, 1)

    assert not torch.equal(weights(second), weights(third))


def test_a_restore_continues_the_random_streams(tiny_folder: Path, tmp_path: Path) -> None:
    trainer, rng = new_trainer(tiny_folder), random.Random(5)
    rng.random()
    checkpoint.save(tmp_path / "c", trainer, rng)
    expected = [rng.random(), torch.rand(1).item()]

    other = random.Random(6)
    torch.manual_seed(99)
    checkpoint.restore(tmp_path / "c", trainer, other)

    assert [other.random(), torch.rand(1).item()] == expected


def test_a_checkpoint_before_the_first_step_restores(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = new_trainer(tiny_folder)
    checkpoint.save(tmp_path / "c", trainer, random.Random(0))

    checkpoint.restore(tmp_path / "c", trainer, random.Random(0))

    step(trainer, 0)


def test_a_checkpoint_holds_nothing_but_safetensors_and_json(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = new_trainer(tiny_folder)
    step(trainer, 0)

    checkpoint.save(tmp_path / "c", trainer, random.Random(0))

    assert sorted(file.name for file in (tmp_path / "c").iterdir()) == [
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]
    json.loads((tmp_path / "c" / "state.json").read_text())
    assert {t.dtype for t in load_file(tmp_path / "c" / "weights.safetensors").values()} == {
        torch.float32
    }


def test_a_torn_checkpoint_is_refused_and_nothing_changes(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = new_trainer(tiny_folder)
    checkpoint.save(tmp_path / "c", trainer, random.Random(0))
    step(trainer, 0)
    before = weights(trainer)
    torn = tmp_path / "c" / "weights.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])

    with pytest.raises(BackendError, match="cannot read checkpoint"):
        checkpoint.restore(tmp_path / "c", trainer, random.Random(0))

    assert torch.equal(weights(trainer), before)


def test_a_checkpoint_of_another_model_is_refused(
    tiny_folder: Path, demo_folder: Path, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "c", new_trainer(demo_folder), random.Random(0))

    with pytest.raises(BackendError, match="another model"):
        checkpoint.restore(tmp_path / "c", new_trainer(tiny_folder), random.Random(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_a_model_folder_with_the_trained_weights(
    demo_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    trainer = new_trainer(demo_folder)
    step(trainer, 0)

    checkpoint.export(tmp_path / "e", trainer.model, dtype, demo_folder)

    exported = PolicyTrainer(load(tmp_path / "e"), lambda: load(tmp_path / "e"))
    assert torch.equal(weights(exported), weights(trainer).to(dtype).float())
    folder, source = open_model_folder(tmp_path / "e"), open_model_folder(demo_folder)
    assert (folder.eos_ids, folder.max_model_len) == (source.eos_ids, source.max_model_len)
    assert json.loads((tmp_path / "e" / "config.json").read_text())["dtype"] == str(dtype)[6:]


def test_an_export_keeps_the_models_generation_config(demo_folder: Path, tmp_path: Path) -> None:
    """Configs that transformers calls inconsistent are common, and the model maker's choice."""
    source = tmp_path / "source"
    checkpoint.export(source, load(demo_folder), torch.float32, demo_folder)
    odd = {"temperature": 0.6, "top_k": 20, "do_sample": False, "eos_token_id": [2, 0]}
    (source / "generation_config.json").write_text(json.dumps(odd))

    checkpoint.export(tmp_path / "e", load(source), torch.float32, source)

    folder = open_model_folder(tmp_path / "e")
    assert folder.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert folder.eos_ids == {0, 2}


def test_missing_weights_of_the_config_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    checkpoint.export(tmp_path / "e", load(tiny_folder), torch.float32, tiny_folder)
    file = tmp_path / "e" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(BackendError, match=r"lacks weights.*model\.norm\.weight"):
        load(tmp_path / "e")
