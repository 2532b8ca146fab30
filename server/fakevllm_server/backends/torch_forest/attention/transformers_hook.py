"""The hook into transformers: an attention implementation that takes a layout as an argument.

A model set to this implementation computes as with `sdpa`. Only in a forward pass with
`forest=LAYOUT` does the layout decide which nodes a node attends to. The layout is an argument of
the forward pass, so a layer that gradient checkpointing computes again during the backward pass
gets the same layout.
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
    """An attention over the nodes of a forest. A node attends to its ancestors and itself; in
    layers with a window, only to those less than `window` positions back."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return the attention output, [1, heads, nodes, size]. The arguments have the same shape;
        keys and values have fewer heads under grouped-query attention."""
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
    """Attention function with the signature that transformers calls. Inputs are
    [batch, heads, tokens, size]; the output is [batch, tokens, heads, size]."""
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
    """Return the model that consists of body and LM head, without peft's wrapper. Adapters that
    peft put into the layers stay there."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: Any) -> Any:
    """Return the model without its LM head."""
    return causal_model(model).base_model


def install_attention(model: Any) -> None:
    """Make `model` accept a layout. Without a layout it computes as with `sdpa`."""
    causal = causal_model(model)
    if causal.config._attn_implementation != IMPLEMENTATION:
        causal.set_attn_implementation(IMPLEMENTATION)


def head_states(model: Any, plan: Plan, layout: Layout) -> Tensor:
    """Return the hidden states on which the LM head runs, [heads, hidden]."""
    return node_states(model, plan.ids, plan.pos, layout).index_select(0, plan.head_node)


def node_states(model: Any, ids: Tensor, pos: Tensor, layout: Layout) -> Tensor:
    """Return the last hidden state of every node, [nodes, hidden]. `ids` and `pos` are [nodes]."""
    install_attention(model)
    # transformers passes a mask of four dimensions on unchanged. Without one, it would take jumps
    # of the positions for packed sequences and build a mask of nodes times nodes. The layouts read
    # neither mask.
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
    """Repeat keys or values [1, key heads, nodes, size] for every head of the query."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)
