"""A type to compute in that is not the weights' own.

The weights stay in float32, which small updates need. Matrix products and attention run in bfloat16
by autocast; norms, the residual stream and all behind the LM head stay in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from fakevllm_server.backends.torch_forest.transformers_attention import body_of, causal_model

MARK = "fakevllm_computes_in"
"""On a module whose forward pass was wrapped: in which type."""


def set_compute_dtype(model: Any, dtype: torch.dtype) -> None:
    """From now on `model` computes in `dtype`; nothing changes where that is its weights' type. To
    be called again where layers were put in the place of others."""
    causal = causal_model(model)
    if dtype == causal.dtype:
        return
    for module in (body_of(model), causal.get_output_embeddings()):
        if getattr(module, MARK, None) != dtype:
            # Not around a whole step: sampling goes on in its pauses, on the same thread.
            module.forward = torch.autocast(causal.device.type, dtype)(module.forward)
            setattr(module, MARK, dtype)


def compute_dtype(model: Any) -> torch.dtype:
    return getattr(body_of(model), MARK, causal_model(model).dtype)
