"""FlexAttention over a forest (calls as trees of tokens). This is the attention method for GPUs. A
node is a token of a tree. In depth-first order, the nodes of each subtree are consecutive.
Therefore the ends of all subtrees determine the attention mask.

FlexAttention needs a mask of whole blocks of nodes. This module computes the block mask from the
subtree ends in each block. For a hundred thousand nodes, this takes about ten milliseconds and
almost no memory. Torch's own function would evaluate every pair of nodes. The attention kernel is
compiled once for all lengths. A compilation for each length would take longer than a training step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fakevllm_server.backends.torch_forest.attention.transformers_hook import node_states
from fakevllm_server.backends.torch_forest.forward_plan import Plan, as_tensor

BLOCK = 128
"""Block size of the kernels, in nodes. The number of nodes is padded to a multiple of the block
size."""


class FlexLayout:
    """A Layout (an object that computes attention over a forest) that uses FlexAttention. A node of
    the forest is a token. FlexAttention works on blocks of nodes, so padding nodes fill the last
    block. Each padding node is a tree of its own, so no other node attends to it."""

    def __init__(self, plan: Plan) -> None:
        num_nodes = len(plan.ids)
        num_added = -num_nodes % BLOCK
        added = torch.arange(num_nodes, num_nodes + num_added, device=plan.device)
        self.ids = torch.cat([plan.ids, torch.zeros_like(added)])
        self.pos = torch.cat([plan.pos, torch.zeros_like(added)])
        self._tout = torch.cat([as_tensor(plan.forest.tout, plan.device), added + 1])
        self._masks: dict[int | None, BlockMask] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        attended: Any = _compiled(query.device.type)(
            query,
            key,
            value,
            block_mask=self.block_mask(window),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended

    def block_mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = block_mask(self._tout, self.pos, window)
        return self._masks[window]


def block_mask(tout: Tensor, pos: Tensor, window: int | None, size: int = BLOCK) -> BlockMask:
    """Return FlexAttention's block mask of a forest, whose nodes are the tokens of calls. `tout`
    has, for each node, the first node after the node's subtree. `pos` has the position of each
    node. Both tensors are [nodes]. The number of nodes is a multiple of the block size `size`.
    `window` is the attention window in tokens, or None.

    With a window, the mask may list a pair (query block, key block) in which no query attends to a
    key. Such a pair costs time but does not change the result, because FlexAttention also applies a
    mask of single nodes inside the listed pairs.
    """
    num_blocks = len(tout) // size
    ends, positions = tout.view(num_blocks, size), pos.view(num_blocks, size)
    first = torch.arange(num_blocks, device=tout.device) * size
    last = first + size - 1
    below = first[:, None] > first[None, :]
    # `whole`: all nodes of the query block are in the subtrees of all nodes of the key block.
    # `some`: some nodes of the query block are in the subtree of some node of the key block.
    whole = below & (last[:, None] < ends.amin(1)[None, :])
    some = below & (first[:, None] < ends.amax(1)[None, :])
    some |= torch.eye(num_blocks, dtype=torch.bool, device=tout.device)
    if window is not None:
        low, high = positions.amin(1), positions.amax(1)
        whole &= high[:, None] - low[None, :] < window
        some &= low[:, None] - high[None, :] < window
    return BlockMask.from_kv_blocks(
        *_block_lists(some & ~whole),
        *_block_lists(whole),
        BLOCK_SIZE=size,
        mask_mod=_mask_mod(tout, pos, window),
    )


def _mask_mod(tout: Tensor, pos: Tensor, window: int | None) -> Any:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < tout[key])

    def visible_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        near = pos[query] - pos[key] < window
        return (key <= query) & (query < tout[key]) & near

    return visible if window is None else visible_in_window


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a table of blocks to the tensors (counts, indices) that FlexAttention expects.
    `blocks`, [query blocks, key blocks] of bool, is True where a query block attends to a key
    block.

    `counts` has the number of attended key blocks of each query block, [1, 1, query blocks].
    `indices` has all key blocks for each query block, [1, 1, query blocks, key blocks]. The
    attended key blocks come first.
    """
    counts = blocks.sum(1, dtype=torch.int32)
    order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
    return counts[None, None], order[None, None]


@cache
def _compiled(device_type: str) -> Any:
    # Compiled for a CPU, FlexAttention has no backward pass. The tests use it without compilation.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


def flex(model: Any, plan: Plan) -> Tensor:
    """Run the model with FlexAttention. Return the hidden states from which the LM head predicts
    the trained tokens, [heads, hidden]. A head in this shape is a node (a token of the forest) that
    predicts trained tokens, not an attention head."""
    layout = FlexLayout(plan)
    return node_states(model, layout.ids, layout.pos, layout).index_select(0, plan.head_node)
