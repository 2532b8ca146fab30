"""Attention over a forest, whose nodes are the tokens of calls, with one mask of shape [nodes,
nodes]. This method is the reference for the tests, and is fast for tiny trees.

Scores are also computed for the pairs of nodes that the mask hides. Therefore time and memory are
quadratic in the number of nodes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakevllm_server.backends.torch_forest.attention.transformers_hook import head_states, repeat_kv
from fakevllm_server.backends.torch_forest.forward_plan import Plan, as_tensor


class DenseLayout:
    """A Layout that uses one mask of all pairs of nodes. A Layout computes attention over a forest,
    whose nodes are the tokens of calls."""

    def __init__(self, plan: Plan) -> None:
        self._pos = plan.pos
        node = torch.arange(len(plan.ids), device=plan.device)
        tout = as_tensor(plan.forest.tout, plan.device)
        self._visible = (node[None, :] <= node[:, None]) & (node[:, None] < tout[None, :])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            repeat_kv(key, query),
            repeat_kv(value, query),
            # One mask for the whole model would lose the windows of individual layers.
            attn_mask=self.visible(window)[None, None],
            scale=scale,
        )

    def visible(self, window: int | None) -> Tensor:
        """Return the attention mask, [nodes, nodes] of bool. Nodes are the tokens of the forest. An
        entry is True if the query node (row) attends to the key node (column). `window` is the
        layer's attention window in tokens, or None."""
        if window is None:
            return self._visible
        return self._visible & (self._pos[:, None] - self._pos[None, :] < window)


def dense(model: Any, plan: Plan) -> Tensor:
    """Run the model with one attention mask of all pairs of nodes (tokens of the forest). Return
    the hidden states from which the LM head predicts the trained tokens, [heads, hidden]. A head in
    this shape is a node that predicts trained tokens, not an attention head."""
    return head_states(model, plan, DenseLayout(plan))
