"""Target modules of adapters, and refused LoRA settings."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    load,
    plain_logprobs,
    random_calls,
    train,
)
from swarm_server.backends.embedded.lora_helpers import IDS, LORA, new_trainer, trained

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.weights import MergedWeights, named_weights
from fakevllm_server.types.backend import BackendRefused, LossSpec


@pytest.mark.parametrize(
    ("wanted", "adapted"),
    [
        ("q_proj, v_proj", {"q_proj", "v_proj"}),
        ("lm_head", {"lm_head"}),
        ("model.layers.1.mlp.up_proj", {"up_proj"}),
        (["o_proj", "down_proj"], {"o_proj", "down_proj"}),
    ],
)
def test_adapters_go_where_the_job_says(tiny_folder: Path, wanted: Any, adapted: set[str]) -> None:
    trainer = trained(tiny_folder, target_modules=wanted)
    names = {name for name, one in trainer.model.named_parameters() if one.requires_grad}
    assert {name.partition(".lora_")[0].rpartition(".")[2] for name in names} == adapted
    plain, merged = load(tiny_folder), MergedWeights(trainer.model)
    with torch.no_grad():
        for name, tensor in named_weights(plain).items():
            tensor.copy_(merged[name])
    torch.testing.assert_close(
        plain_logprobs(plain, IDS), plain_logprobs(trainer.model, IDS), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("q_proj,nope", "'nope', no linear layer of this model: it has down_proj, gate_proj,"),
        ("proj", "'proj', no .* up_proj, v_proj; name some of these, or \"all-linear\"$"),
        ("", "'', no linear layer"),
        ("embed_tokens", "'embed_tokens', no linear layer"),
        ("q_proj,lm_head", "the LM head, which is this model's embedding too"),
    ],
)
def test_unknown_target_modules_are_refused_before_anything_changes(
    demo_folder: Path, wanted: str, message: str
) -> None:
    trainer = new_trainer(demo_folder)
    with pytest.raises(BackendRefused, match=message) as caught:
        trainer.boot(TrainJob(**LORA, target_modules=wanted))
    assert "lm_head" not in str(caught.value), "this model's is its embedding"
    assert all(one.requires_grad for one in trainer.model.parameters())
    trainer.boot(TrainJob())


def test_without_peft_one_line_says_what_to_install(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    new_trainer(tiny_folder).boot(TrainJob())
    with pytest.raises(
        BackendRefused, match=r"lora_rank needs peft.*pip install -e '\.\[emb"
    ) as message:
        new_trainer(tiny_folder).boot(TrainJob(**LORA))
    assert "\n" not in str(message.value)


@pytest.mark.parametrize("setting", [{"lora_alpha": 8}, {"target_modules": "q_proj"}])
def test_adapter_settings_without_a_rank_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="would change nothing, it is for lora_rank"):
        LossSpec.of(TrainJob(**setting))
    LossSpec.of(TrainJob(lora_rank=1, **setting))


class ImportRecorder(MetaPathFinder):
    """An import finder that records the names of modules imported for the first time."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        self.names.append(name)


def test_training_all_weights_never_imports_peft(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    recorder = ImportRecorder()
    monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
    train(new_trainer(tiny_folder), random_calls(2), gradient_checkpointing=True)
    assert not [name for name in recorder.names if name.startswith("peft")]
