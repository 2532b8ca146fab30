"""Attention over a forest (calls as trees of tokens), computed segment by segment. A segment is a
maximal range of nodes (tokens) without a branch. The queries of a segment are its nodes. The keys
are all nodes from the root to the end of the segment.

This method runs on every device, and supports layers with an attention window. Segments with the
same parent and the same length form a batch, which one kernel launch computes. Each launch copies
the keys and values of the path from the root. The method `chains`, which runs only on a CPU, avoids
this copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fakevllm_server.backends.torch_forest.attention.transformers_hook import head_states, repeat_kv
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.forest import Forest
from fakevllm_server.forest.consecutive_nodes import Slices

KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels that torch may choose. On an H200 with torch 2.11, cuDNN's kernel fails in the backward
pass of segments with ancestors: an illegal memory access, after which the process cannot use the
GPU."""


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments (ranges of nodes without a branch) that one kernel launch computes. All segments of
    a batch have the same parent and the same length."""

    ancestors: Slices
    """Ancestors that all segments of the batch have in common, from the root, as ranges of
    nodes."""
    nodes: Tensor
    """[segments, length] Indices of the nodes of each segment."""


class SegmentLayout:
    """A Layout (an object that computes attention over a forest) that computes one batch of
    segments after another. A segment is a range of nodes (tokens) without a branch."""

    def __init__(self, plan: Plan) -> None:
        self._batches = list(segment_batches(plan.forest, plan.device))
        order = torch.cat([batch.nodes.flatten() for batch in self._batches])
        self._index_of_node = torch.empty_like(order)
        self._index_of_node[order] = torch.arange(len(order), device=order.device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        key, value = repeat_kv(key, query), repeat_kv(value, query)
        parts = [
            _attend(batch, query[0], key[0], value[0], scale, window) for batch in self._batches
        ]
        return torch.cat(parts, 1).index_select(1, self._index_of_node)[None]


def segment_batches(forest: Forest, device: torch.device) -> Iterator[SegmentBatch]:
    """Yield the segments (ranges of nodes without a branch) of a forest in batches. All segments of
    a batch have the same parent and the same length."""
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for segment in forest.segments:
        batches[segment.parent, segment.end - segment.start].append(segment.start)
    for (parent, length), starts in batches.items():
        first = torch.tensor(starts, device=device)[:, None]
        yield SegmentBatch(
            forest.segments[parent].path if parent >= 0 else (),
            first + torch.arange(length, device=device),
        )


def _attend(
    batch: SegmentBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return the attention output of a batch of segments (ranges of nodes without a branch),
    [heads, segments * length, head dim]. `query`, `key` and `value` cover all nodes of the forest,
    [heads, nodes, head dim] each. `window` is the layer's attention window in tokens, or None."""
    num_segments, length = batch.nodes.shape
    # Ancestors that are outside the window of the segment's first token are outside the window of
    # all its tokens.
    ancestors = batch.ancestors if window is None else _last_nodes(batch.ancestors, window - 1)
    num_ancestors = sum(end - start for start, end in ancestors)

    def select_segments(values: Tensor) -> Tensor:
        flat = values.index_select(1, batch.nodes.flatten())
        return flat.unflatten(1, (num_segments, length)).transpose(0, 1)

    def with_ancestors(values: Tensor) -> Tensor:
        if not ancestors:
            return select_segments(values)
        shared = torch.cat([values[:, start:end] for start, end in ancestors], 1)
        return torch.cat(
            [shared[None].expand(num_segments, -1, -1, -1), select_segments(values)], 2
        )

    plain = num_ancestors == 0 and (window is None or length <= window)
    with sdpa_kernel(KERNELS):
        attended = F.scaled_dot_product_attention(
            select_segments(query),
            with_ancestors(key),
            with_ancestors(value),
            attn_mask=None if plain else _mask(length, num_ancestors, window, query.device),
            is_causal=plain,
            scale=scale,
        )
    return attended.transpose(0, 1).flatten(1, 2)


def _last_nodes(path: Slices, number: int) -> Slices:
    """Return the last `number` nodes of a path, as ranges [start, end) of consecutive nodes."""
    kept: list[tuple[int, int]] = []
    for start, end in reversed(path):
        if number <= 0:
            break
        kept.append((max(start, end - number), end))
        number -= end - start
    return tuple(reversed(kept))


def _mask(length: int, num_ancestors: int, window: int | None, device: torch.device) -> Tensor:
    """Return the attention mask of a segment (a range of nodes without a branch), [length,
    num_ancestors + length] of bool. Each node of the segment attends to all nodes from the root
    down to itself. With a window, the node attends only to nodes that are less than `window`
    positions back."""
    num_keys = num_ancestors + length
    mask = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(num_ancestors)
    return mask if window is None else mask.triu(num_ancestors - window + 1)


def segments(model: Any, plan: Plan) -> Tensor:
    """Run the model, and compute the attention segment by segment. A segment is a range of nodes
    (tokens of the forest) without a branch. Return the hidden states from which the LM head
    predicts the trained tokens, [heads, hidden]. A head in this shape is a node that predicts
    trained tokens, not an attention head."""
    return head_states(model, plan, SegmentLayout(plan))
