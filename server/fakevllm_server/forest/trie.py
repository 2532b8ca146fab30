"""Calls to a forest of tokens: each distinct prefix is one node.

A causal model's hidden state at a position depends on the ids up to it and on nothing behind it, so
all calls that share a prefix can share its states. Laid out in DFS pre-order, with the depth as the
position id and every node seeing its ancestors and itself, one pass over the nodes gives the states
of every call. What makes a prefix mean something else (adapter, images, offset) is in its root key.

Nodes are numbered in that order. A node's subtree is [node, tout[node]), so

    key k is visible to query q   <=>   k <= q < tout[k]

Built as a radix trie without recursion: time is a few block copies per token of the calls, and
Python's own steps are per segment.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from fakevllm_server.forest.edges import Edges, TrainedSpans, edges_of
from fakevllm_server.forest.slices import Slices, first_difference, joined


@dataclass(frozen=True, slots=True)
class CallTokens:
    """One call as the model reads it. What else belongs to it (advantage, log-probabilities,
    weight, group) stays with the caller, by index. Raises ValueError for spans that cannot be.
    """

    ids: Sequence[int]
    """Prompt and response."""
    trained: Sequence[tuple[int, int]]
    """Positions [start, end) of `ids` in the loss: ascending, apart, and never the first token,
    which nothing predicts."""
    root: Hashable = None
    """All that changes what the model computes from the same ids. Calls of differing keys share
    nothing."""
    temperature: float = 1.0
    """Logits are divided by it; not part of the root, for hidden states do not depend on it."""
    chosen_from: Sequence[bytes | None] | None = None
    """The packed set (allowed.py) each of `ids` was chosen from, None for all of the vocabulary:
    log-probabilities are of the distribution over it. Read where trained; no part of the root
    either."""

    def __post_init__(self) -> None:
        end = 1
        for start, stop in self.trained:
            if not end <= start < stop <= len(self.ids):
                raise ValueError(f"cannot train on [{start}, {stop}) of {len(self.ids)} tokens")
            end = stop
        if self.chosen_from is not None and len(self.chosen_from) != len(self.ids):
            raise ValueError("a set for each token, or for none")
        if self.trained and not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"nothing trains at temperature {self.temperature}")

    @staticmethod
    def of(
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        root: Hashable = None,
        temperature: float = 1.0,
    ) -> CallTokens:
        """Trained on the whole response.

        >>> CallTokens.of([1, 2], [3]).trained
        [(2, 3)]
        """
        ids = [*prompt_ids, *response_ids]
        spans = [(len(prompt_ids), len(ids))] if response_ids else []
        return CallTokens(ids, spans, root, temperature)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes without a branch, as long as can be: one node of the radix trie."""

    start: int
    end: int
    """Nodes [start, end); never empty."""
    tout: int
    """The end of the subtree of each of its nodes."""
    depth: int
    """Position of its first token."""
    parent: int
    """Index of the segment it continues, or -1."""
    children: tuple[int, ...]
    """Indices of segments: none, or at least two. The heaviest comes first and so lies next to its
    parent."""
    path: Slices
    """The nodes from the root to its own end: the keys its queries see, its own causally. At most
    1 + log2(nodes) slices, because the heaviest child comes first."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Arrays are by node, in DFS pre-order; 8 bytes an item, for torch.frombuffer (which takes no
    empty array).

    The same calls in another order give the same trees; trees of differing root keys come in the
    order of the first call of each key.
    """

    ids: array[int]
    pos: array[int]
    """Depth: the position id, 0 for the first token of a call."""
    parent: array[int]
    """-1 for a first token."""
    tout: array[int]
    segments: Sequence[Segment]
    """In DFS pre-order; those with parent -1 begin a tree."""
    paths: Sequence[Slices]
    """For each call the nodes it runs through, in order; empty for a call without tokens."""
    edges: Edges
    num_naive: int
    """Tokens of the calls laid out one by one."""

    @property
    def num_nodes(self) -> int:
        return len(self.ids)

    @property
    def rho(self) -> float:
        """Tokens of the calls per token of the forest: at least 1."""
        return self.num_naive / self.num_nodes if self.num_nodes else 1.0

    @property
    def tin(self) -> range:
        """Nodes are numbered by it."""
        return range(self.num_nodes)

    def row(self, call: int) -> array[int]:
        """The node at every position of a call."""
        nodes = array("q")
        for start, end in self.paths[call]:
            nodes.extend(range(start, end))
        return nodes


def build_forest(calls: Sequence[CallTokens]) -> Forest:
    """The forest of these calls; paths and edges keep their order.

    >>> forest = build_forest([CallTokens.of([1, 2], [3]), CallTokens.of([1, 2], [4])])
    >>> list(forest.ids), list(forest.row(1)), forest.rho
    ([1, 2, 3, 4], [0, 1, 3], 1.5)
    """
    rows = [array("q", call.ids) for call in calls]
    roots: dict[Hashable, dict[int, _Run]] = {}
    for call, ids in zip(calls, rows, strict=True):
        _insert(roots.setdefault(call.root, {}), ids)
    segments = _laid_out(roots)
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
    wanted = [
        TrainedSpans(path, call.trained, call.temperature, call.chosen_from)
        for call, path in zip(calls, paths, strict=True)
    ]
    return Forest(
        ids=ids,
        pos=pos,
        parent=parent,
        tout=tout,
        segments=[segment for segment, _ in segments],
        paths=paths,
        edges=edges_of(wanted, ids, parent, [segment.start for segment, _ in segments]),
        num_naive=sum(map(len, rows)),
    )


@dataclass(slots=True, eq=False)
class _Run:
    """A segment while the trie grows. Its tokens are those of a call that runs through it, at its
    own depths."""

    source: array[int]
    start: int
    end: int
    """Depths."""
    children: dict[int, _Run] = field(default_factory=dict[int, "_Run"])
    """By their first token."""
    size: int = 0
    """Nodes of its subtree."""
    index: int = -1
    """Of its segment, once laid out."""

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
            # A call that goes on where others end is no branch.
            run.source, run.end = ids, length
            return
        children = run.children


def _laid_out(roots: dict[Hashable, dict[int, _Run]]) -> list[tuple[Segment, _Run]]:
    """Segments in DFS pre-order."""
    _weigh([run for tops in roots.values() for run in tops.values()])
    order: list[_Run] = []
    parents: list[int] = []
    stack = [(run, -1) for tops in roots.values() for run in _heaviest_first(tops)][::-1]
    children: list[list[int]] = []
    while stack:
        run, above = stack.pop()
        run.index = len(order)
        order.append(run)
        parents.append(above)
        children.append([])
        if above >= 0:
            children[above].append(run.index)
        stack.extend((child, run.index) for child in reversed(_heaviest_first(run.children)))
    segments: list[tuple[Segment, _Run]] = []
    start = 0
    for run, above, below in zip(order, parents, children, strict=True):
        end = start + run.end - run.start
        path = joined(segments[above][0].path if above >= 0 else (), start, end)
        segment = Segment(start, end, start + run.size, run.start, above, tuple(below), path)
        segments.append((segment, run))
        start = end
    return segments


def _weigh(tops: Sequence[_Run]) -> None:
    order: list[_Run] = []
    stack = list(tops)
    while stack:
        run = stack.pop()
        order.append(run)
        stack.extend(run.children.values())
    for run in reversed(order):
        below = sum(child.size for child in run.children.values())
        run.size = run.end - run.start + below


def _heaviest_first(children: dict[int, _Run]) -> list[_Run]:
    return [run for _, run in sorted(children.items(), key=lambda item: (-item[1].size, item[0]))]


def _path(
    children: dict[int, _Run], ids: array[int], segments: Sequence[tuple[Segment, _Run]]
) -> Slices:
    """Where a call that was inserted runs."""
    if not ids:
        return ()
    run = children[ids[0]]
    while run.end < len(ids):
        run = run.children[ids[run.end]]
    segment, _ = segments[run.index]
    surplus = run.end - len(ids)
    start, end = segment.path[-1]
    return (*segment.path[:-1], (start, end - surplus))
