"""The seam with transformers: an attention implementation that takes a layout as an argument.

A model set to it computes as with `sdpa`, but for calls with `forest=LAYOUT`, whose nodes attend as
the layout says. The layout comes as an argument of the forward pass, so that a pass that is
computed again for gradient checkpointing, in the middle of a backward, is the same pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fakevllm_server.backends.torch_forest.plan import Plan

IMPLEMENTATION = "fakevllm_forest"


class Layout(Protocol):
    """How nodes attend: each to its ancestors and itself, and in layers with a window only to those
    less than `window` positions back."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """[1, heads, nodes, size], keys and values with fewer heads if they are shared ->
        [1, heads, nodes, size]"""
        ...


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    forest: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it, [batch, heads, tokens, size] -> [batch, tokens, heads, size]."""
    if forest is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    assert dropout == 0, "with dropout a shared prefix is no longer the same for all"
    # Under autocast rotated queries and keys come in float32, and their values do not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = forest.attend(query, key, value, scale, kwargs.get("sliding_window"))
    return attended.transpose(1, 2).contiguous(), None


# Without a mask function of its own an implementation gets no mask at all, so padding would be
# seen in passes without a forest.
AttentionInterface.register(IMPLEMENTATION, forest_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def causal_model(model: Any) -> Any:
    """The model with body and LM head; adapters that peft has put into its layers stay in."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: Any) -> Any:
    """The model without its LM head."""
    return causal_model(model).base_model


def enable(model: Any) -> None:
    """From now on `model` takes layouts, and computes as with sdpa where there is none."""
    causal = causal_model(model)
    if causal.config._attn_implementation != IMPLEMENTATION:
        causal.set_attn_implementation(IMPLEMENTATION)


def head_states(model: Any, plan: Plan, layout: Layout) -> Tensor:
    """[heads, hidden]: the states the LM head runs on."""
    return node_states(model, plan.ids, plan.pos, layout).index_select(0, plan.head_node)


def node_states(model: Any, ids: Tensor, pos: Tensor, layout: Layout) -> Tensor:
    """[nodes, hidden]"""
    enable(model)
    # A mask of four dimensions is handed on as it is. Without one, transformers takes jumps of the
    # positions for packed sequences and makes a mask of nodes times nodes; nobody reads either.
    unread = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    output = body_of(model)(
        input_ids=ids[None],
        position_ids=pos[None],
        attention_mask=unread,
        use_cache=False,
        forest=layout,
    )
    return output.last_hidden_state[0]


def repeat_kv(of_keys: Tensor, query: Tensor) -> Tensor:
    """Keys or values for every head of the query."""
    return of_keys.repeat_interleave(query.shape[1] // of_keys.shape[1], 1)
