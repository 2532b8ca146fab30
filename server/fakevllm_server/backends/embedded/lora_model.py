"""A view of a model with LoRA adapters. A view is a second model object that shares the weights
with the first model and has its own copies of the adapters.

The sampler uses a view if the trained model computes in another dtype than the dtype of its
weights, for example in bfloat16 with float32 weights. Merging float32 adapters into bfloat16
weights would round the adapters, and changes below half the spacing of bfloat16 numbers would be
lost. The view keeps the adapters separate, so sampler and trainer compute the same products. The
weights that do not train are in memory only once.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.train import gradient_checkpointing
from fakevllm_server.backends.embedded.weights import adapters_of, named_weights
from fakevllm_server.backends.torch_forest import autocast

WRAPPING_ATTRIBUTES = ("forward", autocast.MARK, gradient_checkpointing.MARK)
"""Attributes of a module whose forward pass is wrapped. These attributes are not copied into a
view, because a copied wrapper would call the forward pass of the original model."""


def needs_adapter_view(model: PreTrainedModel) -> bool:
    """Return True if the sampler needs a view of the model, because merging would round the
    adapters. This is the case if the model has adapters and computes in another dtype than the
    dtype of its weights."""
    return bool(adapters_of(model)) and autocast.compute_dtype(model) != model.dtype


def adapter_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of `model`, which is a second model object with copies of the present adapters.
    The view shares the tensors of all other weights with `model`. Never copy weights into the view,
    because that would change `model`."""
    shared = [weight for weight in named_weights(model).values() if not weight.requires_grad]
    view: Any = copy.deepcopy(model, {id(weight): weight for weight in shared})
    for module in view.modules():
        for name in vars(module).keys() & set(WRAPPING_ATTRIBUTES):
            delattr(module, name)
    autocast.set_compute_dtype(view, autocast.compute_dtype(model))
    return view.requires_grad_(False)
