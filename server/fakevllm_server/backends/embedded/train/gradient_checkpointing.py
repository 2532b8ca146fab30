"""Gradient checkpointing: a layer keeps its input only, and is computed again in the backward pass.

Transformers' own switch works while a model is in training mode, which turns dropout on. This one
leaves the mode alone.
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


def set_gradient_checkpointing(model: PreTrainedModel, wanted: bool) -> bool:
    """Whether that is a change. Raises BackendRefused for a model without layers to recompute."""
    modules: Any = model.modules()
    layers = [one for one in modules if isinstance(one, GradientCheckpointingLayer)]
    if wanted and not layers:
        raise BackendRefused(
            "this model cannot recompute its layers: take gradient_checkpointing out"
        )
    changed = [layer for layer in layers if hasattr(layer, MARK) is not wanted]
    for layer in changed:
        if wanted:
            setattr(layer, MARK, True)
            layer.forward = _recomputed(layer.forward)
        else:
            delattr(layer, MARK)
            del layer.forward
    return bool(changed)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*given: Any, **named: Any) -> Any:
        # No dropout, so there is no random state to bring back.
        return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False, **named)

    return call
