"""Build a forest of tokens from calls: each distinct prefix of a call is one node.

The hidden state of a causal model at a position depends only on the token ids up to this position.
Calls with a common prefix therefore have equal hidden states in this prefix. In the forest, the
position id of a node is its depth, and each node attends only to itself and its ancestors. One
forward pass over all nodes then gives the hidden states of all calls. Calls may also differ in
other properties that change the hidden states, such as the adapter or images. These properties form
the root key of a call, and calls with different root keys share no nodes.

Nodes are numbered in depth-first pre-order, so the subtree of node k is the range of nodes [k,
tout[k]). The attention mask is therefore

    key k is visible to query q   <=>   k <= q < tout[k]

The forest is built as a radix trie, without recursion. A segment is a maximal range of nodes
without a branch, and is one node of the radix trie. Tokens are compared and copied in blocks, so
the number of Python steps depends on the number of segments and not on the number of tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from fakevllm_server.forest.consecutive_nodes import Slices, append_slice, first_difference
from fakevllm_server.forest.token_edges import Edges, TrainedSpans, find_edges


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of one model call, and the positions that are trained.

    The caller keeps all other data of the call, such as advantage and log-probabilities, under the
    call's index. The constructor raises ValueError in three cases: the trained spans are invalid,
    `allowed_sets` does not have one entry for each token, or the temperature of a trained call is
    not positive and finite.
    """

    ids: Sequence[int]
    """Token ids of the prompt, followed by those of the response."""
    trained: Sequence[tuple[int, int]]
    """Spans [start, end) of the positions that count in the loss. The spans are ascending and
    disjoint. They cannot contain position 0, because nothing predicts the first token."""
    root: Hashable = None
    """Root key: it stands for all properties of the call, except for the ids, that change the
    hidden states. Calls with different root keys share no node."""
    temperature: float = 1.0
    """Divisor of the logits. The temperature is not part of the root key, because hidden states do
    not depend on it."""
    allowed_sets: Sequence[bytes | None] | None = None
    """For each position in `ids`, the set of tokens that could be sampled there, packed as in
    `types.token_masks`. None means the whole vocabulary. Log-probabilities are those of the
    distribution over the set. Only the sets of trained tokens are used. Sets are not part of the
    root key, because hidden states do not depend on them."""

    def __post_init__(self) -> None:
        end = 1
        for start, stop in self.trained:
            if not end <= start < stop <= len(self.ids):
                raise ValueError(f"cannot train on [{start}, {stop}) of {len(self.ids)} tokens")
            end = stop
        if self.allowed_sets is not None and len(self.allowed_sets) != len(self.ids):
            raise ValueError("allowed_sets must have one entry for each token")
        if self.trained and not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"cannot train at temperature {self.temperature}")

    @staticmethod
    def of(
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        root: Hashable = None,
        temperature: float = 1.0,
    ) -> CallTokens:
        """Create the CallTokens of a call from its prompt and its response. The whole response is
        trained.

        >>> CallTokens.of([1, 2], [3]).trained
        [(2, 3)]
        """
        ids = [*prompt_ids, *response_ids]
        spans = [(len(prompt_ids), len(ids))] if response_ids else []
        return CallTokens(ids, spans, root, temperature)


@dataclass(frozen=True, slots=True)
class Segment:
    """A maximal range of consecutive nodes without a branch, which is one node of the radix
    trie."""

    start: int
    end: int
    """The nodes of the segment are [start, end). There is at least one node."""
    tout: int
    """End of the subtree, which is the same for all nodes of the segment."""
    depth: int
    """Position id of the segment's first node."""
    parent: int
    """Index of the segment that this segment continues, or -1."""
    children: tuple[int, ...]
    """Indices of the segments that continue this segment: none, or at least two. The child with the
    largest subtree comes first, so the nodes of this child directly follow those of this
    segment."""
    path: Slices
    """The nodes from the root to the end of this segment. The queries of the segment attend to
    these nodes as keys, with the causal mask inside the segment. There are at most 1 + log2(number
    of nodes) slices, because the child with the largest subtree comes first."""


@dataclass(frozen=True, slots=True)
class Forest:
    """The token trees of a set of calls. Each node is one token, and calls with a common prefix
    share the nodes of this prefix.

    The arrays `ids`, `pos`, `parent` and `tout` have one item per node, in depth-first pre-order.
    An item has 8 bytes, so `torch.frombuffer` can read a non-empty array as 64-bit integers. The
    shape of a tree does not depend on the order of the calls. Calls with different root keys (for
    example different adapters) are in different trees. Root keys are in the order in which the
    calls first use them, and trees are in the order of their root keys.
    """

    ids: array[int]
    """Token id of each node."""
    pos: array[int]
    """Position id of each node, which is its depth: 0 for the first token of a call."""
    parent: array[int]
    """Parent of each node, or -1 for the first token of a call."""
    tout: array[int]
    """End of the subtree of each node."""
    segments: Sequence[Segment]
    """The segments in DFS pre-order. A segment with parent -1 begins a tree."""
    paths: Sequence[Slices]
    """For each call, the nodes of the call in order; empty for a call without tokens."""
    edges: Edges
    num_naive: int
    """Total number of tokens of the calls, without sharing."""

    @property
    def num_nodes(self) -> int:
        return len(self.ids)

    @property
    def rho(self) -> float:
        """The sharing factor, which is at least 1: the number of tokens of all calls, divided by
        the number of nodes (tokens of the forest)."""
        return self.num_naive / self.num_nodes if self.num_nodes else 1.0

    @property
    def tin(self) -> range:
        """The numbers of all nodes in depth-first pre-order: 0, 1, …, num_nodes - 1. The subtree of
        node k is the range [k, tout[k])."""
        return range(self.num_nodes)

    def row(self, call: int) -> array[int]:
        """Return the nodes of the call with index `call`, one node for each position in the
        call."""
        nodes = array("q")
        for start, end in self.paths[call]:
            nodes.extend(range(start, end))
        return nodes


def build_forest(calls: Sequence[CallTokens]) -> Forest:
    """Return the forest of `calls`. The fields `paths` and `edges.per_call` of the forest are in
    the order of `calls`.

    >>> forest = build_forest([CallTokens.of([1, 2], [3]), CallTokens.of([1, 2], [4])])
    >>> list(forest.ids), list(forest.row(1)), forest.rho
    ([1, 2, 3, 4], [0, 1, 3], 1.5)
    """
    rows = [array("q", call.ids) for call in calls]
    roots: dict[Hashable, dict[int, _Run]] = {}
    for call, ids in zip(calls, rows, strict=True):
        _insert(roots.setdefault(call.root, {}), ids)
    segments = _lay_out(roots)
    ids, pos, parent, tout = array("q"), array("q"), array("q"), array("q")
    for segment, run in segments:
        length = segment.end - segment.start
        ids.extend(run.source[run.start : run.end])
        pos.extend(range(run.start, run.end))
        above = segments[segment.parent][0].end - 1 if segment.parent >= 0 else -1
        parent.append(above)
        parent.extend(range(segment.start, segment.end - 1))
        tout.extend(array("q", [segment.tout]) * length)
    paths = [_path(roots[call.root], row, segments) for call, row in zip(calls, rows, strict=True)]
    trained = [
        TrainedSpans(path, call.trained, call.temperature, call.allowed_sets)
        for call, path in zip(calls, paths, strict=True)
    ]
    return Forest(
        ids=ids,
        pos=pos,
        parent=parent,
        tout=tout,
        segments=[segment for segment, _ in segments],
        paths=paths,
        edges=find_edges(trained, ids, parent, [segment.start for segment, _ in segments]),
        num_naive=sum(map(len, rows)),
    )


@dataclass(slots=True, eq=False)
class _Run:
    """A segment (a range of nodes without a branch) of the trie while the trie is built."""

    source: array[int]
    """Ids of a call that contains this run."""
    start: int
    end: int
    """The tokens of the run are source[start:end]. `start` and `end` are also depths in the
    tree."""
    children: dict[int, _Run] = field(default_factory=dict[int, "_Run"])
    """The runs that continue this run, by their first token."""
    size: int = 0
    """Number of nodes of this run and of all runs below it."""
    index: int = -1
    """Index of the segment, once it is laid out."""

    def split(self, depth: int) -> None:
        below = _Run(self.source, depth, self.end, self.children)
        self.end, self.children = depth, {self.source[depth]: below}


def _insert(children: dict[int, _Run], ids: array[int]) -> None:
    at, length = 0, len(ids)
    while at < length:
        run = children.get(ids[at])
        if run is None:
            children[ids[at]] = _Run(ids, at, length)
            return
        at = first_difference(run.source, ids, at, min(run.end, length))
        if at == length:
            return
        if at < run.end:
            run.split(at)
        elif not run.children:
            # A call that continues where other calls end is not a branch.
            run.source, run.end = ids, length
            return
        children = run.children


def _lay_out(roots: dict[Hashable, dict[int, _Run]]) -> list[tuple[Segment, _Run]]:
    """Make a Segment from each run (a range of nodes without a branch). Return the pairs (segment,
    run) in depth-first pre-order. `roots` maps each root key to a dict with the first runs of its
    trees. The keys of this dict are the first tokens of the runs."""
    _set_sizes([run for tops in roots.values() for run in tops.values()])
    order: list[_Run] = []
    parents: list[int] = []
    stack = [(run, -1) for tops in roots.values() for run in _largest_first(tops)][::-1]
    children: list[list[int]] = []
    while stack:
        run, above = stack.pop()
        run.index = len(order)
        order.append(run)
        parents.append(above)
        children.append([])
        if above >= 0:
            children[above].append(run.index)
        stack.extend((child, run.index) for child in reversed(_largest_first(run.children)))
    segments: list[tuple[Segment, _Run]] = []
    start = 0
    for run, above, below in zip(order, parents, children, strict=True):
        end = start + run.end - run.start
        path = append_slice(segments[above][0].path if above >= 0 else (), start, end)
        segment = Segment(start, end, start + run.size, run.start, above, tuple(below), path)
        segments.append((segment, run))
        start = end
    return segments


def _set_sizes(tops: Sequence[_Run]) -> None:
    order: list[_Run] = []
    stack = list(tops)
    while stack:
        run = stack.pop()
        order.append(run)
        stack.extend(run.children.values())
    for run in reversed(order):
        below = sum(child.size for child in run.children.values())
        run.size = run.end - run.start + below


def _largest_first(children: dict[int, _Run]) -> list[_Run]:
    return [run for _, run in sorted(children.items(), key=lambda item: (-item[1].size, item[0]))]


def _path(
    children: dict[int, _Run], ids: array[int], segments: Sequence[tuple[Segment, _Run]]
) -> Slices:
    """Return the nodes of the call with the tokens `ids`. This call must have been inserted
    before."""
    if not ids:
        return ()
    run = children[ids[0]]
    while run.end < len(ids):
        run = run.children[ids[run.end]]
    segment, _ = segments[run.index]
    surplus = run.end - len(ids)
    start, end = segment.path[-1]
    return (*segment.path[:-1], (start, end - surplus))
