"""LoRA: adapters train beside weights that stay. Peft's layers, in the model itself.

Peft is imported when a job asks for adapters, and not before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.weights import MergedWeights, adapters_of
from fakevllm_server.types.backend import BackendRefused

ALL_LINEAR = "all-linear"
SEEN_OF_EACH = 64
"""Numbers of every weight that tell one model from another of its shape."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int
    alpha: int
    target_modules: str

    @staticmethod
    def of(job: TrainJob) -> LoraSettings | None:
        """None trains all weights."""
        if job.lora_rank == 0:
            return None
        return LoraSettings(job.lora_rank, job.lora_alpha, job.target_modules)

    def told(self) -> dict[str, Any]:
        return asdict(self)


def describe_settings(lora: LoraSettings | None) -> str:
    """As a job spells it."""
    if lora is None:
        return "lora_rank = 0"
    return (
        f"lora_rank = {lora.rank}, lora_alpha = {lora.alpha}, "
        f'target_modules = "{lora.target_modules}"'
    )


def describe_trainable(model: PreTrainedModel, lora: LoraSettings | None) -> str:
    """What of a model trains, in words."""
    count = sum(one.numel() for one in model.parameters())
    if lora is None:
        return f"all {count:,} parameters"
    own = sum(one.numel() for one in model.parameters() if one.requires_grad)
    layers = len(adapters_of(model))
    return f"LoRA of rank {lora.rank} on {layers} layers, {own:,} of {count:,} parameters"


def insert_adapters(model: PreTrainedModel, lora: LoraSettings, seed: int) -> None:
    """The model computes as before, and only its new adapters train. Raises BackendRefused before
    anything has changed.
    """
    places = _places(model, lora.target_modules)
    peft = _peft()
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=places, lora_dropout=0.0, bias="none"
    )
    # Not from the process's stream of random numbers: a restore has to find it where it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    model.eval()


@contextlib.contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The weights as they were before training. Not around a pause of a step: it is the same
    model."""
    for adapter in adapters_of(model).values():
        adapter.enable_adapters(False)
    try:
        yield
    finally:
        for adapter in adapters_of(model).values():
            adapter.enable_adapters(True)


def fingerprint(model: PreTrainedModel) -> str:
    """Of the weights that stay. An adapter is worth nothing on others, and their shapes alone do
    not tell."""
    seen = hashlib.sha256()
    for name, tensor in sorted(MergedWeights(model).unmerged.items()):
        some = tensor.detach().flatten()[:SEEN_OF_EACH].cpu().contiguous()
        seen.update(name.encode())
        seen.update(bytes(some.view(torch.uint8).tolist()))
    return seen.hexdigest()


def _places(model: PreTrainedModel, wanted: str) -> list[str]:
    """The full names of the layers that get an adapter."""
    network: Any = model
    head = network.get_output_embeddings()
    linear = {name: one for name, one in network.named_modules() if isinstance(one, nn.Linear)}
    if wanted == ALL_LINEAR:
        places = [name for name, one in linear.items() if one is not head]
        if not places:
            raise BackendRefused("no layer of this model fits an adapter: take lora_rank out")
        return places
    barred = {
        place for place, one in linear.items() if one is head and network.config.tie_word_embeddings
    }
    found: set[str] = set()
    for name in map(str.strip, wanted.split(",")):
        own = {place for place in linear if f".{place}".endswith(f".{name}")}
        if not own:
            known = sorted({place.rpartition(".")[2] for place in linear if place not in barred})
            raise BackendRefused(
                f"target_modules names {name!r}, no linear layer of this model: it has "
                f'{", ".join(known)}; name some of these, or "{ALL_LINEAR}"'
            )
        found |= own
    if found & barred:
        raise BackendRefused(
            "target_modules names the LM head, which is this model's embedding too: take it out"
        )
    return sorted(found)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise BackendRefused(
            f"lora_rank needs peft, which cannot be imported ({error}): "
            "pip install -e '.[embedded]'"
        ) from error
    return peft
