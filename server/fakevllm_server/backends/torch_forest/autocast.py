"""Computation in another dtype than that of the weights, with torch's autocast.

The weights stay in float32, because small updates would be lost in bfloat16. Matrix products and
attention run in bfloat16 under autocast. Norms, the residual stream and everything after the LM
head stay in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from fakevllm_server.backends.torch_forest.attention.transformers_hook import body_of, causal_model

MARK = "fakevllm_compute_dtype"
"""Name of the attribute that marks a module whose forward pass is wrapped in autocast. The
attribute's value is the dtype."""


def set_compute_dtype(model: Any, dtype: torch.dtype) -> None:
    """Set the dtype in which `model` computes. If `dtype` is the dtype of the weights, do nothing.

    Call this function again after layers of the model have been replaced.
    """
    causal = causal_model(model)
    if dtype == causal.dtype:
        return
    for module in (body_of(model), causal.get_output_embeddings()):
        if getattr(module, MARK, None) != dtype:
            # Autocast must not wrap a whole step: sampling runs on the same thread while the step
            # is paused.
            module.forward = torch.autocast(causal.device.type, dtype)(module.forward)
            setattr(module, MARK, dtype)


def compute_dtype(model: Any) -> torch.dtype:
    """Return the dtype in which `model` computes."""
    return getattr(body_of(model), MARK, causal_model(model).dtype)
