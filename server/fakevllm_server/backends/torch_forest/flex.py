"""FlexAttention over the intervals of the forest: the GPU's way.

The block mask is reckoned from the subtree ends of whole blocks, so that a hundred thousand nodes
take some ten milliseconds and no memory; torch would ask about every pair. Compiled once for all
lengths: a compilation per length takes longer than a step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fakevllm_server.backends.torch_forest.plan import Plan, as_tensor
from fakevllm_server.backends.torch_forest.transformers_attention import node_states

BLOCK = 128
"""Nodes; the kernels' own block size, and the number of nodes is padded to it."""


class FlexLayout:
    """Of nodes padded to whole blocks; the added ones are trees of one node each."""

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
    """Of [nodes], a multiple of `size`. With a window, a block may be visited of which nothing is
    seen."""
    num_blocks = len(tout) // size
    ends, places = tout.view(num_blocks, size), pos.view(num_blocks, size)
    first = torch.arange(num_blocks, device=tout.device) * size
    last = first + size - 1
    below = first[:, None] > first[None, :]
    # All of a block lies in the subtrees of all of the other; or some of it in some of them.
    whole = below & (last[:, None] < ends.amin(1)[None, :])
    some = below & (first[:, None] < ends.amax(1)[None, :])
    some |= torch.eye(num_blocks, dtype=torch.bool, device=tout.device)
    if window is not None:
        low, high = places.amin(1), places.amax(1)
        whole &= high[:, None] - low[None, :] < window
        some &= low[:, None] - high[None, :] < window
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
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


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[queries, keys] of bool -> for each query block how many, and which key blocks first."""
    number = blocks.sum(1, dtype=torch.int32)
    which = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
    return number[None, None], which[None, None]


@cache
def _compiled(device_type: str) -> Any:
    # Compiled for a CPU it has no backward, and as it is it serves the tests.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


def flex(model: Any, plan: Plan) -> Tensor:
    """[heads, hidden]"""
    layout = FlexLayout(plan)
    return node_states(model, layout.ids, layout.pos, layout).index_select(0, plan.head_node)
