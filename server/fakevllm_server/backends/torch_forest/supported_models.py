"""Allow-list of the model types whose calls may share prefixes.

Calls that share prefixes are put into one row. An attention mask decides which earlier tokens of
the row belong to a call. In the models of this list, the hidden state at a token depends only on
the token's position, and on the ids of the tokens that the mask allows. Other models would silently
give wrong results. Examples of unsuitable parts of a model:

* Recurrent layers (linear attention, Mamba, short convolutions) depend on all earlier tokens of the
  row, including tokens of other calls.
* Dynamic RoPE depends on the length of the longest call.
* ALiBi depends on the place of a token in the row.
"""

from __future__ import annotations

from typing import Any

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose code has been reviewed and tested. `edge_log_probs` repeats everything that
these models compute after the LM head."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE types whose frequencies depend only on the config."""
PROMPT_ADAPTERS = frozenset(
    {"PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING"}
)
"""Peft's adapter types that put keys before the first token."""


def sharing_refusal(model: Any) -> str | None:
    """Return the reason why calls cannot share prefixes in this model, or None if they can."""
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
    return {rope.get("rope_type", "default") for rope in nested or [parameters]}


def _adapter_refusal(model: Any) -> str | None:
    for adapter in getattr(model, "peft_config", {}).values():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if kind in PROMPT_ADAPTERS:
            return f"an adapter of type {kind} puts keys before the first token"
        if model.training and getattr(adapter, "lora_dropout", 0.0):
            return "it trains with dropout in its adapter"
    return None
