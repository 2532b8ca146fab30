"""Which models may share prefixes: those whose state at a token depends on the ids before it and
its position alone, through attention that takes any set of keys.

An allow-list, because the others go wrong in silence: layers that scan (linear attention, Mamba,
short convolutions) read nodes in their row's order, dynamic RoPE depends on the longest call, ALiBi
on the place in a row.
"""

from __future__ import annotations

from typing import Any

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Read and tested. They run no code on logits after the LM head either, which `forward` would
miss."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Their frequencies come from the config alone."""
PROMPT_ADAPTERS = frozenset(
    {"PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING"}
)
"""Of peft: they put keys before the first token."""


def sharing_refusal(model: Any) -> str | None:
    """Why calls cannot share prefixes in this model, or None if they can."""
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        return f"models of type {config.model_type} are not known to share prefixes"
    layers = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if layers:
        return f"layers of type {', '.join(layers)} cannot share prefixes"
    ropes = sorted(_rope_types(config) - ROPE_TYPES)
    if ropes:
        return f"positions of type {', '.join(ropes)} may depend on the length of a call"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    if model.training and getattr(config, "attention_dropout", 0.0):
        return "it trains with dropout in its attention"
    return _adapter_refusal(model)


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {one.get("rope_type", "default") for one in nested or [parameters]}


def _adapter_refusal(model: Any) -> str | None:
    for adapter in getattr(model, "peft_config", {}).values():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if kind in PROMPT_ADAPTERS:
            return f"an adapter of type {kind} puts keys before the first token"
        if model.training and getattr(adapter, "lora_dropout", 0.0):
            return "it trains with dropout in its adapter"
    return None
