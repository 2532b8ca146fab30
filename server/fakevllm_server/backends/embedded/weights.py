"""The weights of a model by name, with LoRA adapters kept separate or merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers by name. If several parameters are tied,
    only one of them is included."""
    stored = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


class MergedWeights(Mapping[str, Tensor]):
    """A mapping from names to weights of a model, with the LoRA adapters merged. The names are
    those of the weights before the adapters were inserted. A weight is merged with its adapter only
    when the weight is read. Therefore no second copy of the whole model is in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        adapters = adapters_of(model)
        own = {
            f"{place}.{name}"
            for place, adapter in adapters.items()
            for name, _ in adapter.named_parameters()
            if not name.startswith("base_layer.")
        }
        self.unmerged: dict[str, Tensor] = {}
        """The weights by name, without the contribution of the adapters."""
        self._adapters: dict[str, Any] = {}
        for name, tensor in named_weights(model).items():
            place, is_adapted, rest = name.rpartition(".base_layer.")
            if is_adapted:
                self.unmerged[f"{place}.{rest}"] = tensor
                if rest == "weight":
                    self._adapters[f"{place}.{rest}"] = adapters[place]
            elif name not in own:
                self.unmerged[name] = tensor

    def __getitem__(self, name: str) -> Tensor:
        tensor, adapter = self.unmerged[name].detach(), self._adapters.get(name)
        if adapter is None:
            return tensor
        with torch.no_grad():
            (adapter_name,) = adapter.active_adapters
            return tensor + adapter.get_delta_weight(adapter_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.unmerged)

    def __len__(self) -> int:
        return len(self.unmerged)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.unmerged.items()}


def adapters_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the LoRA adapters of a model, by the name of the layer that each adapter replaces. The
    adapters are layers of the peft library."""
    modules: Any = model.named_modules()
    return {name: module for name, module in modules if hasattr(module, "base_layer")}


def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the weights of `source` into `target` in place. The adapters of `source` are merged into
    the copied weights. The caller must check first that both models have the same architecture. An
    error in the middle of the copy would make `target` useless."""
    merged = MergedWeights(source)
    with torch.no_grad():
        for name, tensor in named_weights(target).items():
            tensor.copy_(merged[name])
