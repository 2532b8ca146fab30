"""A view of a model with adapters: a second model with the same weights and its own adapters.

The view samples if adapters are trained in another type than the type of the weights. Merging such
adapters into bfloat16 weights would round them to the grid of the weights and lose everything below
half a grid step. The view does not merge: sampler and trainer compute the same products, and the
weights that do not train exist once.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.train import gradient_checkpointing
from fakevllm_server.backends.embedded.weights import adapters_of, named_weights
from fakevllm_server.backends.torch_forest import autocast

WRAPPING_ATTRIBUTES = ("forward", autocast.MARK, gradient_checkpointing.MARK)
"""Attributes of a module whose forward pass is wrapped. They are not copied: a copied wrapper would
call the other model's forward pass."""


def needs_adapter_view(model: PreTrainedModel) -> bool:
    """Return whether merging the adapters would round them. This is so if the model has adapters
    and computes in another type than that of its weights."""
    return bool(adapters_of(model)) and autocast.compute_dtype(model) != model.dtype


def adapter_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that computes as `model` does now. The returned model has its own adapters. It
    shares the tensors of all other weights with `model`, so weights must never be copied into
    it."""
    shared = [weight for weight in named_weights(model).values() if not weight.requires_grad]
    view: Any = copy.deepcopy(model, {id(weight): weight for weight in shared})
    for module in view.modules():
        for name in vars(module).keys() & set(WRAPPING_ATTRIBUTES):
            delattr(module, name)
    autocast.set_compute_dtype(view, autocast.compute_dtype(model))
    return view.requires_grad_(False)
