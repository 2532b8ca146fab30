"""Attention per trie segment: its tokens ask, the keys are the nodes of its path.

Runs on every device and in layers with a window. Equal siblings go in one launch. Keys and values
of a path are copied for every launch, which `chains` spares a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.backends.torch_forest.transformers_attention import head_states, repeat_kv
from fakevllm_server.forest import Forest
from fakevllm_server.forest.slices import Slices


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments of one length behind one parent."""

    above: Slices
    """Their common ancestors, from the root."""
    nodes: Tensor
    """[segments, length]"""


class SegmentLayout:
    def __init__(self, plan: Plan) -> None:
        self._launches = list(segment_batches(plan.forest, plan.device))
        order = torch.cat([launch.nodes.flatten() for launch in self._launches])
        self._place = torch.empty_like(order)
        self._place[order] = torch.arange(len(order), device=order.device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        key, value = repeat_kv(key, query), repeat_kv(value, query)
        parts = [
            _attend(launch, query[0], key[0], value[0], scale, window) for launch in self._launches
        ]
        return torch.cat(parts, 1).index_select(1, self._place)[None]


def segment_batches(forest: Forest, device: torch.device) -> Iterator[SegmentBatch]:
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for segment in forest.segments:
        alike[segment.parent, segment.end - segment.start].append(segment.start)
    for (parent, length), starts in alike.items():
        first = torch.tensor(starts, device=device)[:, None]
        yield SegmentBatch(
            forest.segments[parent].path if parent >= 0 else (),
            first + torch.arange(length, device=device),
        )


def _attend(
    launch: SegmentBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """[heads, nodes, size] each -> [heads, segments * length, size]"""
    num_segments, length = launch.nodes.shape
    # What even the first token of a segment is too far from, none of it sees.
    above = launch.above if window is None else _last(launch.above, window - 1)
    num_above = sum(end - start for start, end in above)

    def own(values: Tensor) -> Tensor:
        flat = values.index_select(1, launch.nodes.flatten())
        return flat.unflatten(1, (num_segments, length)).transpose(0, 1)

    def with_above(values: Tensor) -> Tensor:
        if not above:
            return own(values)
        shared = torch.cat([values[:, start:end] for start, end in above], 1)
        return torch.cat([shared[None].expand(num_segments, -1, -1, -1), own(values)], 2)

    plain = num_above == 0 and (window is None or length <= window)
    attended = F.scaled_dot_product_attention(
        own(query),
        with_above(key),
        with_above(value),
        attn_mask=None if plain else _mask(length, num_above, window, query.device),
        is_causal=plain,
        scale=scale,
    )
    return attended.transpose(0, 1).flatten(1, 2)


def _last(path: Slices, number: int) -> Slices:
    kept: list[tuple[int, int]] = []
    for start, end in reversed(path):
        if number <= 0:
            break
        kept.append((max(start, end - number), end))
        number -= end - start
    return tuple(reversed(kept))


def _mask(length: int, num_above: int, window: int | None, device: torch.device) -> Tensor:
    """[length, num_above + length] of bool: causal to the lower right."""
    mask = torch.ones(length, num_above + length, dtype=torch.bool, device=device).tril(num_above)
    return mask if window is None else mask.triu(num_above - window + 1)


def segments(model: Any, plan: Plan) -> Tensor:
    """[heads, hidden]"""
    return head_states(model, plan, SegmentLayout(plan))
