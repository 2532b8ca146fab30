"""Attention for transformers' models in which several query heads share a key head.

transformers copies keys and values once per query head as soon as there is an attention mask. On a
CPU, torch's attention can read the keys and values without a copy. The result is the same to the
bit. In a decode iteration with many tokens in the KV cache, the copies took most of the time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

NAME = "fakevllm_grouped_sdpa"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model on a CPU compute attention without copies of keys and values. The model stays
    unchanged if it is on another device, or if its attention implementation is not `sdpa`."""
    config: Any = model.config
    if model.device.type == "cpu" and config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=query.shape[2] > 1 and attention_mask is None and bool(is_causal),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
