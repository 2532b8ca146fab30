"""Gradient checkpointing: a layer keeps only its input, and computes its activations again in the
backward pass. This saves memory.

The library `transformers` supports gradient checkpointing only in training mode, which also enables
dropout. The trainer keeps its model in evaluation mode. Therefore this module has its own
implementation, which works in both modes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fakevllm_server.types.backend import BackendRefused

MARK = "fakevllm_is_recomputed"
"""Name of the attribute that marks a layer whose forward pass is wrapped, so that its activations
are recomputed."""


def set_gradient_checkpointing(model: PreTrainedModel, enabled: bool) -> bool:
    """Switch gradient checkpointing of a model on or off. Return True if this changed the model's
    setting. Raises BackendRefused if `enabled` is true and the model's layers do not support
    gradient checkpointing."""
    modules: Any = model.modules()
    layers = [one for one in modules if isinstance(one, GradientCheckpointingLayer)]
    if enabled and not layers:
        raise BackendRefused(
            "this model cannot recompute its layers: take gradient_checkpointing out"
        )
    changed = [layer for layer in layers if hasattr(layer, MARK) is not enabled]
    for layer in changed:
        if enabled:
            setattr(layer, MARK, True)
            layer.forward = _recomputed(layer.forward)
        else:
            delattr(layer, MARK)
            del layer.forward
    return bool(changed)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        # There is no dropout, so no random state must be restored.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call
