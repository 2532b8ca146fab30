"""An attention implementation for transformers that takes a layout as an argument. A layout
computes attention over a forest (calls as trees of tokens).

In a forward pass with the argument `forest=LAYOUT`, the layout decides to which nodes each node
attends. Without this argument, the model computes as with `sdpa`. The layout is an argument and not
a global setting. The reason is gradient checkpointing, which runs a layer again in the backward
pass. The layer then gets the same layout.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fakevllm_server.backends.torch_forest.forward_plan import Plan

IMPLEMENTATION = "fakevllm_forest"


class Layout(Protocol):
    """An object that computes attention over the nodes (tokens) of a forest (calls as trees of
    tokens). Each node attends to itself and to its ancestors. In a layer with an attention window,
    a node attends only to ancestors less than `window` positions back."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return the attention output, [1, heads, nodes, head dim]. `query` has the same shape.
        `key` and `value` may have fewer heads (grouped-query attention). `window` is the layer's
        attention window in tokens, or None."""
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
    """Compute attention with the layout `forest`. If `forest` is None, compute it with `sdpa`.
    transformers calls this function in each layer. `query`, `key` and `value` are [batch, heads,
    tokens, head dim]. Return (output, attention weights or None). The output is [batch, tokens,
    heads, head dim]."""
    if forest is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    assert dropout == 0, (
        "dropout must be off, because it would differ between the calls that share a prefix"
    )
    # Under autocast, rotated queries and keys arrive in float32, but values do not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = forest.attend(query, key, value, scale, kwargs.get("sliding_window"))
    return attended.transpose(1, 2).contiguous(), None


# An implementation without a mask function of its own gets no mask at all: passes without a forest
# would then attend to padding.
AttentionInterface.register(IMPLEMENTATION, forest_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def causal_model(model: Any) -> Any:
    """Return the causal language model (body and LM head). If `model` is a wrapper of the peft
    library, return the model inside the wrapper. This model still has the adapter layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: Any) -> Any:
    """Return the model without its LM head."""
    return causal_model(model).base_model


def install_attention(model: Any) -> None:
    """Make `model` use the attention implementation of this module. The model's forward pass then
    accepts a layout (an object that computes attention over calls as trees of tokens). Without a
    layout, the model computes as with `sdpa`."""
    causal = causal_model(model)
    if causal.config._attn_implementation != IMPLEMENTATION:
        causal.set_attn_implementation(IMPLEMENTATION)


def head_states(model: Any, plan: Plan, layout: Layout) -> Tensor:
    """Run the model on all nodes of a plan (a forest as tensors) with the given layout. Return the
    hidden states from which the LM head predicts the trained tokens, [heads, hidden]. A head in
    this shape is a node that predicts trained tokens, not an attention head."""
    return node_states(model, plan.ids, plan.pos, layout).index_select(0, plan.head_node)


def node_states(model: Any, ids: Tensor, pos: Tensor, layout: Layout) -> Tensor:
    """Run the model without its LM head on all nodes (the distinct tokens of some calls) with the
    given layout. `ids` has the token ids and `pos` the position ids of the nodes, [nodes] each.
    Return the last layer's hidden states, [nodes, hidden]."""
    install_attention(model)
    # transformers passes a mask of four dimensions on unchanged. Without such a mask, it would
    # interpret jumps of the positions as packed sequences, and build a mask of nodes times nodes.
    # The layouts read neither mask.
    unused_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    output = body_of(model)(
        input_ids=ids[None],
        position_ids=pos[None],
        attention_mask=unused_mask,
        use_cache=False,
        forest=layout,
    )
    return output.last_hidden_state[0]


def repeat_kv(states: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of keys or values, [1, key heads, nodes, head dim]. Every head of `query`
    then has its own key or value head."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)
