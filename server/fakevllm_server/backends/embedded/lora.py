"""LoRA: training of small adapter layers, while the model's own weights stay unchanged.

The adapters are layers of the peft library. The layers are inserted into the model itself. peft is
imported only for a job with adapters.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.weights import MergedWeights, adapters_of
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.types.backend import BackendRefused

ALL_LINEAR = "all-linear"
FINGERPRINT_VALUES = 64
"""Number of values of each weight that enter a model's fingerprint."""


def describe_trainable(model: PreTrainedModel, lora: LoraSettings | None) -> str:
    """Return a text for messages that names the trained parameters and their number."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if lora is None:
        return f"all {count:,} parameters"
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    layers = len(adapters_of(model))
    return f"LoRA of rank {lora.rank} on {layers} layers, {trained:,} of {count:,} parameters"


def insert_adapters(model: PreTrainedModel, lora: LoraSettings, seed: int) -> None:
    """Insert new LoRA adapters into the model. From then on, only the adapters are trained. Until
    the first update, the model's outputs do not change. Raises BackendRefused if
    `lora.target_modules` does not fit the model, or if peft cannot be imported. The model is then
    unchanged."""
    layers = target_layers(model, lora.target_modules)
    peft = _peft()
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=layers, lora_dropout=0.0, bias="none"
    )
    # The process's random stream stays untouched, so that a restore can continue it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    model.eval()


@contextlib.contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters within the `with` block, so that the model computes with its starting
    weights. A generator must not yield inside the block, because other code would then use the
    model with disabled adapters."""
    for adapter in adapters_of(model).values():
        adapter.enable_adapters(False)
    try:
        yield
    finally:
        for adapter in adapters_of(model).values():
            adapter.enable_adapters(True)


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of some values of each weight of the model, without its adapters. The hash
    identifies the model for which adapters were trained. Comparing only shapes would not detect
    another model of the same shape."""
    digest = hashlib.sha256()
    for name, tensor in sorted(MergedWeights(model).unmerged.items()):
        values = tensor.detach().flatten()[:FINGERPRINT_VALUES].cpu().contiguous()
        digest.update(name.encode())
        digest.update(bytes(values.view(torch.uint8).tolist()))
    return digest.hexdigest()


def target_layers(model: PreTrainedModel, target_modules: str) -> list[str]:
    """Return the full names of the layers that get an adapter. `target_modules` is the job's
    setting of this name.

    Raises BackendRefused in three cases:

    * The model has no layer for an adapter.
    * A name in `target_modules` matches no linear layer.
    * The LM head would get an adapter although it shares its weight with the embedding.
    """
    network: Any = model
    head = network.get_output_embeddings()
    linear = {name: one for name, one in network.named_modules() if isinstance(one, nn.Linear)}
    if target_modules == ALL_LINEAR:
        layers = [name for name, one in linear.items() if one is not head]
        if not layers:
            raise BackendRefused("no layer of this model fits an adapter: take lora_rank out")
        return layers
    excluded = {
        layer for layer, one in linear.items() if one is head and network.config.tie_word_embeddings
    }
    targets: set[str] = set()
    for name in map(str.strip, target_modules.split(",")):
        matching = {layer for layer in linear if f".{layer}".endswith(f".{name}")}
        if not matching:
            known = sorted({layer.rpartition(".")[2] for layer in linear if layer not in excluded})
            raise BackendRefused(
                f"target_modules names {name!r}, no linear layer of this model: it has "
                f'{", ".join(known)}; name some of these, or "{ALL_LINEAR}"'
            )
        targets |= matching
    if targets & excluded:
        raise BackendRefused(
            "target_modules names the LM head, which is this model's embedding too: take it out"
        )
    return sorted(targets)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise BackendRefused(
            f"lora_rank needs peft, which cannot be imported ({error}): "
            "pip install -e '.[embedded]'"
        ) from error
    return peft
