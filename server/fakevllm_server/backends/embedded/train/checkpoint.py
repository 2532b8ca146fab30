"""Save, restore and export the state of the trainer. A checkpoint consists of safetensors and JSON
files, so reading it runs no code.

    weights.safetensors     float32; with LoRA only the adapters
    optimizer.safetensors   AdamW's state, as `<weight>.exp_avg`, `<weight>.exp_avg_sq` and
                            `<weight>.step`
    state.json              random state; with LoRA also the LoRA settings and a hash of the model

Other settings of the job, such as the learning rate, are not in the checkpoint. Therefore the user
may change these settings when a run continues from a checkpoint.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from fakevllm_server.backends.embedded.lora import fingerprint
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.embedded.weights import MergedWeights, adapters_of, named_weights
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.types.backend import BackendError, BackendRefused, PolicyName

WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
)
PEFT_PREFIX = "base_model.model."
"""Prefix of each weight's name in a folder that peft has written."""

AdapterWeights = tuple[Tensor, Tensor]
"""The two factors of one adapter, which peft calls `lora_A` and `lora_B`. The adapter adds their
product `lora_B @ lora_A`, multiplied by the scale, to the layer's weight."""


def save(folder: Path, trainer: PolicyTrainer, rng: random.Random) -> None:
    """Write a checkpoint of the trainer to a folder. The checkpoint includes the state of `rng`,
    the sampler's random number generator for requests without a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_detached(_saved_weights(trainer)), folder / "weights.safetensors")
    save_file(_detached(_optimizer_tensors(trainer)), folder / "optimizer.safetensors")
    version, words, gauss = rng.getstate()
    torch_rng = base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()
    state: dict[str, Any] = {
        "format": 1,
        "torch_rng": torch_rng,
        "sampler_rng": [version, list(words), gauss],
    }
    if trainer.lora is not None:
        state |= {"lora": trainer.lora.to_json(), "model": fingerprint(trainer.model)}
    (folder / "state.json").write_text(json.dumps(state))


def restore(folder: Path, trainer: PolicyTrainer, rng: random.Random) -> None:
    """Restore the trainer and the random number generator `rng` from a checkpoint. If the
    checkpoint cannot be read or does not fit the model, no weight changes, and BackendError is
    raised."""
    weights, moments, state = _read(folder)
    lora = LoraSettings(**state["lora"]) if "lora" in state else None
    if lora is not None and state["model"] != fingerprint(trainer.model):
        raise BackendError(f"checkpoint {folder} is of another model than --model")
    trainer.set_lora(lora, f"checkpoint {folder}")
    own = _saved_weights(trainer)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        raise BackendError(f"checkpoint {folder} is of another model than --model")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    slots: dict[str, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        name, _, slot = key.rpartition(".")
        slots.setdefault(name, {})[slot] = tensor
    trainer.optimizer.state.clear()
    for name, parameter in trainer.model.named_parameters():
        if name in slots:
            # AdamW keeps its step counts on the CPU.
            trainer.optimizer.state[parameter] = {
                slot: tensor if slot == "step" else tensor.to(parameter.device)
                for slot, tensor in slots[name].items()
            }
    torch.set_rng_state(torch.tensor(list(base64.b64decode(state["torch_rng"])), dtype=torch.uint8))
    version, words, gauss = state["sampler_rng"]
    rng.setstate((version, tuple(words), gauss))


def export(folder: Path, model: PreTrainedModel, dtype: torch.dtype, source: Path) -> None:
    """Write `model` to a folder in Hugging Face format. The weights are converted to `dtype`, with
    LoRA adapters merged. The tokenizer, chat template and settings are copied from the model folder
    `source`."""
    copy_model_files(source, folder, dtype)
    generation = source / "generation_config.json"
    merged = MergedWeights(model)
    weights = {name: merged[name].to(dtype) for name in merged}
    # transformers refuses to write a generation config that it considers inconsistent. The model's
    # own file is copied unchanged instead.
    original, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = original
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    _write_dtype(folder, dtype)


def export_adapters(folder: Path, trainer: PolicyTrainer, policy: PolicyName) -> None:
    """Write the trained adapters to a folder in the layout of the peft library, as float32. If
    `policy` is `reference`, write adapters that do not change the outputs of the base model. Raises
    BackendRefused if the trainer has no adapters."""
    lora = trainer.lora
    if lora is None:
        raise BackendRefused(
            "the trainer has no adapters to publish: set lora_rank as the run began, or choose "
            "another --run-dir"
        )
    layers: dict[str, AdapterWeights] = {}
    for layer, adapter in adapters_of(trainer.model).items():
        (name,) = adapter.active_adapters
        layers[layer] = (adapter.lora_A[name].weight, adapter.lora_B[name].weight)
    write_adapters(folder, layers, lora, policy)


def write_adapters(
    folder: Path, layers: Mapping[str, AdapterWeights], lora: LoraSettings, policy: PolicyName
) -> None:
    """Write LoRA adapters to a folder in the layout of the peft library, as float32. The keys of
    `layers` are the names of the layers that have an adapter. If `policy` is `reference`, write
    zeros in place of each adapter's second factor, so that the adapters change nothing."""
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in layers.items():
        tensors[f"{PEFT_PREFIX}{layer}.lora_A.weight"] = a
        tensors[f"{PEFT_PREFIX}{layer}.lora_B.weight"] = (
            b if policy == "trained" else torch.zeros_like(b)
        )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),
    }
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: tensor.to("cpu", torch.float32) for name, tensor in _detached(tensors).items()}
    save_file(own, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def copy_model_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy all files of a model folder except the weights. Set the dtype in the copied config.json
    to `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)
    _write_dtype(folder, dtype)


def _write_dtype(folder: Path, dtype: torch.dtype) -> None:
    config: Any = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name of the setting in older folders
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _saved_weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """Return the weights that belong in a checkpoint, by name. With LoRA, these are only the
    adapters. Without LoRA, these are all weights."""
    named = named_weights(trainer.model)
    if trainer.lora is None:
        return named
    return {name: tensor for name, tensor in named.items() if tensor.requires_grad}


def _optimizer_tensors(trainer: PolicyTrainer) -> dict[str, Tensor]:
    state = trainer.optimizer.state
    return {
        f"{name}.{slot}": tensor
        for name, parameter in trainer.model.named_parameters()
        if parameter in state
        for slot, tensor in state[parameter].items()
    }


def _detached(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    try:
        state: Any = json.loads((folder / "state.json").read_text())
        return (
            load_file(folder / "weights.safetensors"),
            load_file(folder / "optimizer.safetensors"),
            state,
        )
    # An incomplete or foreign checkpoint raises any of these. The user needs the folder's name.
    except (OSError, ValueError, SafetensorError) as error:
        raise BackendError(f"cannot read checkpoint {folder}: {error}") from error
