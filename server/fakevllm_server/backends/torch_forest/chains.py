"""Attention along heavy chains: the quickest_attention on a CPU.

The heaviest child lies next to its parent, so from every node that is no heaviest child a run of
nodes goes down to a leaf: a chain. Chains cut the forest into stretches that are plain causal
sequences, and what branches off one sees its upper part whole:

    in a chain          causal attention of the stretch to itself
    at a branching      all nodes below the lighter children, to the chain down to the branching

So there is no mask, no copy of keys, and no pair that is not wanted. A node at most log2(nodes)
chains away from its root gets so many partial results, which are put together by their softmax
denominators (as flash attention does with its tiles). A forest without branches is one causal
pass.

The kernels are those `scaled_dot_product_attention` itself takes on a CPU, called by name, for
only so do they tell the denominators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.backends.torch_forest.segments import SegmentLayout
from fakevllm_server.backends.torch_forest.transformers_attention import head_states, repeat_kv
from fakevllm_server.forest import Forest

MAX_PADDING = 1.05
"""Chains of one launch are at most so many times as long as each other; the longer ones gain
nothing from going together, and padding costs its square."""
SHORT = 32
"""Tokens; chains up to this length go together whatever their lengths are."""


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """Chains of one launch."""

    nodes: Tensor
    """[chains, longest] Padded on the right by nodes of others, which causal queries do not see."""
    is_own: Tensor | None
    """[chains, longest] of bool; None where nothing is padding."""
    first: int | None
    """The first node, where `nodes` is a run of nodes: then views will do."""


@dataclass(frozen=True, slots=True)
class CrossBlock:
    """The nodes [first_query, last_query) see all of [first_key, last_key)."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int


def is_available(device: torch.device) -> bool:
    return device.type == "cpu" and _forward is not None and _backward is not None


def chains_of(forest: Forest) -> tuple[list[tuple[int, int]], list[CrossBlock]]:
    """Chains [first, last), and what lies below the lighter children of each branching."""
    chains: list[tuple[int, int]] = []
    crossings: list[CrossBlock] = []
    starts: dict[int, int] = {}
    for index, segment in enumerate(forest.segments):
        start = starts.pop(index, segment.start)
        if not segment.children:
            chains.append((start, segment.end))
            continue
        heaviest, *lighter = segment.children
        starts[heaviest] = start
        first = forest.segments[lighter[0]].start
        crossings.append(CrossBlock(first, segment.tout, start, segment.end))
    return chains, crossings


class ChainLayout:
    def __init__(self, plan: Plan) -> None:
        chains, self.crossings = chains_of(plan.forest)
        self.stretches = list(_stretches(chains))
        self._plan = plan
        self._longest = int(plan.pos.max()) + 1 if len(plan.pos) else 0
        self._segments: SegmentLayout | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if window is not None and window < self._longest:
            self._segments = self._segments or SegmentLayout(self._plan)
            return self._segments.attend(query, key, value, scale, window)
        attended = _ChainAttention.apply(
            query[0], repeat_kv(key, query)[0], repeat_kv(value, query)[0], scale, self
        )
        return attended[None]  # pyright: ignore[reportOptionalSubscript]


def _stretches(chains: Sequence[tuple[int, int]]) -> Iterator[ChainBatch]:
    by_length = sorted(chains, key=lambda chain: (chain[0] - chain[1], chain[0]))
    together: list[tuple[int, int]] = []
    for chain in by_length:
        longest = together[0][1] - together[0][0] if together else 0
        if together and longest > max(SHORT, MAX_PADDING * (chain[1] - chain[0])):
            yield _stretch(together)
            together = []
        together.append(chain)
    if together:
        yield _stretch(together)


def _stretch(chains: Sequence[tuple[int, int]]) -> ChainBatch:
    ordered = sorted(chains)
    longest = max(end - start for start, end in ordered)
    starts = torch.tensor([start for start, _ in ordered])[:, None]
    lengths = torch.tensor([end - start for start, end in ordered])[:, None]
    column = torch.arange(longest)[None, :]
    nodes = starts + torch.minimum(column, lengths - 1)
    if not all(end - start == longest for start, end in ordered):
        return ChainBatch(nodes, column < lengths, None)
    runs = groupby(start - index * longest for index, (start, _) in enumerate(ordered))
    return ChainBatch(nodes, None, ordered[0][0] if len(list(runs)) == 1 else None)


_OP = "_scaled_dot_product_flash_attention_for_cpu"
_forward: Any = getattr(torch.ops.aten, _OP, None)
_backward: Any = getattr(torch.ops.aten, f"{_OP}_backward", None)


class _ChainAttention(torch.autograd.Function):
    """Each launch's share of a softmax over all ancestors. The backward kernel takes the output and
    the denominator of the whole softmax, so every launch gives its exact share of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, layout: ChainLayout
    ) -> Tensor:
        """[heads, nodes, size] each"""
        heads, nodes, size = value.shape
        # Node by node in memory, as the layers around want it.
        out = query.new_empty(nodes, heads, size, dtype=_wide(query.dtype)).transpose(0, 1)
        total = out.new_empty(heads, nodes)
        for stretch in layout.stretches:
            inputs = [_picked(values, stretch) for values in (query, key, value)]
            part, part_total = _forward(*inputs, 0.0, True, scale=scale)
            _put(out, part, stretch)
            _put(total, part_total, stretch)
        for cross in layout.crossings:
            own = slice(cross.first_query, cross.last_query)
            seen = slice(cross.first_key, cross.last_key)
            part, part_total = _forward(
                query[None, :, own], key[None, :, seen], value[None, :, seen], scale=scale
            )
            share = torch.sigmoid(part_total[0] - total[:, own])
            out[:, own].lerp_(part[0].to(out.dtype), share[:, :, None])
            total[:, own] = torch.logaddexp(total[:, own], part_total[0])
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.scale, ctx.layout = scale, layout
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        layout: ChainLayout = ctx.layout
        found = [torch.empty_like(values) for values in (query, key, value)]
        for stretch in layout.stretches:
            inputs = [_picked(values, stretch) for values in (query, key, value, out, total)]
            above = _picked(grad, stretch)
            if stretch.is_own is not None:
                above = above * stretch.is_own[:, None, :, None]
            parts = _backward(above, *inputs, 0.0, True, scale=ctx.scale)
            for into, part in zip(found, parts, strict=True):
                _put(into, part, stretch)
        for cross in layout.crossings:
            own = slice(cross.first_query, cross.last_query)
            seen = slice(cross.first_key, cross.last_key)
            to_query, to_key, to_value = _backward(
                grad[None, :, own],
                query[None, :, own],
                key[None, :, seen],
                value[None, :, seen],
                out[None, :, own],
                total[None, :, own],
                0.0,
                False,
                scale=ctx.scale,
            )
            found[0][:, own] += to_query[0]
            found[1][:, seen] += to_key[0]
            found[2][:, seen] += to_value[0]
        return (*found, None, None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Partial results are added up in this."""
    return torch.promote_types(dtype, torch.float32)


def _picked(values: Tensor, stretch: ChainBatch) -> Tensor:
    """[heads, nodes, …] -> [chains, heads, longest, …], a view where `first` is known"""
    num_chains, longest = stretch.nodes.shape
    if stretch.first is not None:
        rows = values[:, stretch.first : stretch.first + num_chains * longest]
    else:
        rows = values.index_select(1, stretch.nodes.flatten())
    return rows.unflatten(1, (num_chains, longest)).transpose(0, 1)


def _put(into: Tensor, values: Tensor, stretch: ChainBatch) -> None:
    """[chains, heads, longest, …] into [heads, nodes, …]; each node is in one chain."""
    if stretch.first is not None:
        _picked(into, stretch).copy_(values)
        return
    rows = values.transpose(0, 1).flatten(1, 2).to(into.dtype)
    if stretch.is_own is None:
        into[:, stretch.nodes.flatten()] = rows
    else:
        into[:, stretch.nodes[stretch.is_own]] = rows[:, stretch.is_own.flatten()]


def chains(model: Any, plan: Plan) -> Tensor:
    """[heads, hidden]"""
    return head_states(model, plan, ChainLayout(plan))
