"""A view of a model with LoRA adapters: a second model object that shares the base weights of the
first object, and has its own copies of the adapters.

The sampler uses a view if the trained model computes in another dtype than its weights have, for
example in bfloat16 with float32 weights. Merging the adapters into bfloat16 weights would round the
adapters, and small changes would be lost. With the view, the adapters stay separate, so the sampler
and the trainer compute the same products. The base weights are in memory only once.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.train import gradient_checkpointing
from fakevllm_server.backends.embedded.weights import adapters_of, named_weights
from fakevllm_server.backends.torch_forest import autocast

WRAPPING_ATTRIBUTES = ("forward", autocast.MARK, gradient_checkpointing.MARK)
"""Attributes that a module has if its forward pass is wrapped. These attributes are not copied into
a view, because a copied wrapper would call the forward pass of the original model."""


def needs_adapter_view(model: PreTrainedModel) -> bool:
    """Return True if the sampler needs a view of the model (a second model object with its own
    adapters and shared base weights).

    A view is needed if the model has adapters and computes in another dtype than its weights have.
    Merging would then round the adapters.
    """
    return bool(adapters_of(model)) and autocast.compute_dtype(model) != model.dtype


def adapter_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second model object that has copies of the current adapters and shares all other
    weights with `model`. Do not copy weights into the returned model, because the copy would
    overwrite the shared weights of `model`."""
    shared = [weight for weight in named_weights(model).values() if not weight.requires_grad]
    view: Any = copy.deepcopy(model, {id(weight): weight for weight in shared})
    for module in view.modules():
        for name in vars(module).keys() & set(WRAPPING_ATTRIBUTES):
            delattr(module, name)
    autocast.set_compute_dtype(view, autocast.compute_dtype(model))
    return view.requires_grad_(False)
