"""A second model on the weights of one with adapters: what samples where adapters are trained in
another type than the weights'.

Merged into bfloat16 weights, what an adapter adds is rounded to their grid, and what is below half
a step of it is gone. So it is not merged: sampler and trainer compute the same products, and the
weights that do not train are there once.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.train import gradient_checkpointing
from fakevllm_server.backends.embedded.weights import adapters_of, named_weights
from fakevllm_server.backends.torch_forest import precision

OF_THE_ORIGINAL = ("forward", precision.MARK, gradient_checkpointing.MARK)
"""What wraps a module's forward pass: a copy of it would call the other model's."""


def needs_adapter_view(model: PreTrainedModel) -> bool:
    """Whether merging would round: it has adapters, and computes in another type than that of its
    weights."""
    return bool(adapters_of(model)) and precision.compute_dtype(model) != model.dtype


def adapter_view(model: PreTrainedModel) -> PreTrainedModel:
    """Computes as `model` does now. Weights that do not train are the same tensors, so nothing may
    be copied into it; adapters are its own."""
    shared = [one for one in named_weights(model).values() if not one.requires_grad]
    made: Any = copy.deepcopy(model, {id(one): one for one in shared})
    for module in made.modules():
        for name in vars(module).keys() & set(OF_THE_ORIGINAL):
            delattr(module, name)
    precision.set_compute_dtype(made, precision.compute_dtype(model))
    return made.requires_grad_(False)
