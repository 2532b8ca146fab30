"""Attention along chains of nodes in a forest of tokens. This attention method is the fastest on a
CPU.

Each node of the forest is one token, and calls with a common prefix share nodes. The heaviest child
of a node is the child with the largest subtree. Nodes are numbered so that the heaviest child
directly follows its parent. A chain begins at a root, or at a node that is not the heaviest child
of its parent. From there, the chain follows the heaviest children down to a leaf. Therefore the
nodes of a chain are consecutive, and each node is in exactly one chain. A chain is a plain causal
sequence. A node can also have ancestors outside its own chain. These ancestors are the upper parts
of other chains, and the node attends to all of them:

    within a chain    causal attention of the chain to itself
    at a branch       all nodes below the lighter children attend to the chain down to the branch

This method needs no mask and no copy of the ancestors' keys. It computes no pair of nodes that a
mask would hide. The path from the root to a node passes through at most 1 + log2(number of nodes)
chains. Each of these chains gives one partial attention result for the node. The softmax
denominators of the partial results are the weights with which the results are combined, as in flash
attention.

The method directly calls the kernels that `scaled_dot_product_attention` uses on a CPU.
`scaled_dot_product_attention` itself does not return the softmax denominators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.attention.segment_attention import SegmentLayout
from fakevllm_server.backends.torch_forest.attention.transformers_hook import head_states, repeat_kv
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.forest import Forest

MAX_PADDING = 1.05
"""Largest ratio of the lengths of two chains in one kernel launch. Long chains gain nothing from a
common launch, and the cost of padding is quadratic in the length."""
SHORT = 32
"""Chains of up to this many tokens share a kernel launch even if their lengths differ."""


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """Chains that are computed in one kernel launch. A chain is a range of consecutive nodes
    (tokens). Each node of the chain is the parent of the next node."""

    nodes: Tensor
    """[chains, longest] Nodes of each chain, padded on the right by repeating the last node. Under
    the causal mask, no real node attends to the padding."""
    is_real: Tensor | None
    """[chains, longest] False for padding; None if there is no padding."""
    first_node: int | None
    """The first node of the batch, if all its chains together are one run of consecutive nodes;
    else None. For one run, views replace copies."""


@dataclass(frozen=True, slots=True)
class CrossBlock:
    """A block of full attention between nodes (tokens). Each of the nodes [first_query, last_query)
    attends to each of the nodes [first_key, last_key)."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int


def is_available(device: torch.device) -> bool:
    """Return True if torch has the kernels that chain attention needs on `device`."""
    return device.type == "cpu" and _forward is not None and _backward is not None


def find_chains(forest: Forest) -> tuple[list[tuple[int, int]], list[CrossBlock]]:
    """Return (chains, blocks) of a forest, whose nodes are tokens. A chain is a range of nodes
    [first, last): a path down to a leaf that always takes the child with the largest subtree. Each
    branch has one block of full attention. Its queries are all nodes in the subtrees of the
    branch's other children. Its keys are the nodes of the chain from the chain's first node down to
    the branch."""
    chains: list[tuple[int, int]] = []
    cross_blocks: list[CrossBlock] = []
    starts: dict[int, int] = {}
    for index, segment in enumerate(forest.segments):
        start = starts.pop(index, segment.start)
        if not segment.children:
            chains.append((start, segment.end))
            continue
        heaviest, *lighter = segment.children
        starts[heaviest] = start
        first = forest.segments[lighter[0]].start
        cross_blocks.append(CrossBlock(first, segment.tout, start, segment.end))
    return chains, cross_blocks


class ChainLayout:
    """A Layout (an object that computes attention over a forest of tokens) for attention along
    chains. A chain is a path down to a leaf that always takes the child with the largest subtree.
    If a layer's attention window is shorter than the longest call, a SegmentLayout computes this
    layer instead."""

    def __init__(self, plan: Plan) -> None:
        chains, self.cross_blocks = find_chains(plan.forest)
        self.chain_batches = list(_chain_batches(chains))
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


def _chain_batches(chains: Sequence[tuple[int, int]]) -> Iterator[ChainBatch]:
    """Put chains (ranges of consecutive nodes) of similar lengths into common batches, and yield
    the batches. One kernel launch computes one batch."""
    by_length = sorted(chains, key=lambda chain: (chain[0] - chain[1], chain[0]))
    batch: list[tuple[int, int]] = []
    for chain in by_length:
        longest = batch[0][1] - batch[0][0] if batch else 0
        if batch and longest > max(SHORT, MAX_PADDING * (chain[1] - chain[0])):
            yield _chain_batch(batch)
            batch = []
        batch.append(chain)
    if batch:
        yield _chain_batch(batch)


def _chain_batch(chains: Sequence[tuple[int, int]]) -> ChainBatch:
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
    """An autograd function that computes the attention of each node (a token of the forest) to
    itself and all its ancestors. The forward pass combines the partial softmax results of several
    kernel launches. In the backward pass, each launch gets the combined output and the combined
    softmax denominator. Therefore each launch returns its exact part of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, layout: ChainLayout
    ) -> Tensor:
        """Return the attention output of all nodes. Query, key, value and output are [attention
        heads, nodes, head dim]."""
        heads, nodes, size = value.shape
        # Node-major in memory, as the layers before and after need it.
        out = query.new_empty(nodes, heads, size, dtype=_accumulation_dtype(query.dtype)).transpose(
            0, 1
        )
        total = out.new_empty(heads, nodes)
        for batch in layout.chain_batches:
            inputs = [_select(values, batch) for values in (query, key, value)]
            part, part_total = _forward(*inputs, 0.0, True, scale=scale)
            _store(out, part, batch)
            _store(total, part_total, batch)
        for cross in layout.cross_blocks:
            queries = slice(cross.first_query, cross.last_query)
            keys = slice(cross.first_key, cross.last_key)
            part, part_total = _forward(
                query[None, :, queries], key[None, :, keys], value[None, :, keys], scale=scale
            )
            share = torch.sigmoid(part_total[0] - total[:, queries])
            out[:, queries].lerp_(part[0].to(out.dtype), share[:, :, None])
            total[:, queries] = torch.logaddexp(total[:, queries], part_total[0])
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.scale, ctx.layout = scale, layout
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        layout: ChainLayout = ctx.layout
        gradients = [torch.empty_like(values) for values in (query, key, value)]
        for batch in layout.chain_batches:
            inputs = [_select(values, batch) for values in (query, key, value, out, total)]
            grad_out = _select(grad, batch)
            if batch.is_real is not None:
                grad_out = grad_out * batch.is_real[:, None, :, None]
            parts = _backward(grad_out, *inputs, 0.0, True, scale=ctx.scale)
            for target, part in zip(gradients, parts, strict=True):
                _store(target, part, batch)
        for cross in layout.cross_blocks:
            queries = slice(cross.first_query, cross.last_query)
            keys = slice(cross.first_key, cross.last_key)
            to_query, to_key, to_value = _backward(
                grad[None, :, queries],
                query[None, :, queries],
                key[None, :, keys],
                value[None, :, keys],
                out[None, :, queries],
                total[None, :, queries],
                0.0,
                False,
                scale=ctx.scale,
            )
            gradients[0][:, queries] += to_query[0]
            gradients[1][:, keys] += to_key[0]
            gradients[2][:, keys] += to_value[0]
        return (*gradients, None, None)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the partial results of the kernel launches are combined."""
    return torch.promote_types(dtype, torch.float32)


def _select(values: Tensor, batch: ChainBatch) -> Tensor:
    """Return the values at the nodes of a batch of chains. `values` is [heads, nodes, …], and the
    result is [chains, heads, longest chain, …]. If the nodes of the batch are one consecutive
    range, the result is a view of `values`."""
    num_chains, longest = batch.nodes.shape
    if batch.first_node is not None:
        rows = values[:, batch.first_node : batch.first_node + num_chains * longest]
    else:
        rows = values.index_select(1, batch.nodes.flatten())
    return rows.unflatten(1, (num_chains, longest)).transpose(0, 1)


def _store(target: Tensor, values: Tensor, batch: ChainBatch) -> None:
    """Write the values of a batch of chains, [chains, heads, longest chain, …], to the chains'
    nodes in `target`, [heads, nodes, …]. Chains have no common nodes, so each entry is written at
    most once."""
    if batch.first_node is not None:
        _select(target, batch).copy_(values)
        return
    rows = values.transpose(0, 1).flatten(1, 2).to(target.dtype)
    if batch.is_real is None:
        target[:, batch.nodes.flatten()] = rows
    else:
        target[:, batch.nodes[batch.is_real]] = rows[:, batch.is_real.flatten()]


def chains(model: Any, plan: Plan) -> Tensor:
    """Run the model with attention along chains (paths down to a leaf that always take the child
    with the largest subtree). Return the hidden states from which the LM head predicts the trained
    tokens, [heads, hidden]. In this shape, a head is a node (a token of the forest) that predicts
    trained tokens, and not an attention head."""
    return head_states(model, plan, ChainLayout(plan))
