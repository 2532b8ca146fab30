"""Find the log-probabilities that must be computed for a forest, and the calls that use each
log-probability.

Each node of a forest is one token. Calls with a common prefix share the nodes of the prefix. An
*edge* is the prediction of one token from one node, with one temperature and one set of allowed
tokens.

The log-probability of an edge is computed once, and is used by all calls that contain the edge. The
loss still has one term for each token of each call, so the loss equals the loss without sharing.
The backward pass adds up the gradients of all terms that use an edge. It would be wrong to merge
these terms into one term, for example by summing advantages, because a clipped loss is not linear
in the advantage.

Edges are computed for whole ranges of consecutive nodes. Therefore the number of Python steps
depends on the number of trained spans and on the number of segments (parts of the forest without a
branch). The number of steps depends on the number of tokens only if neighbouring tokens have
different sets of allowed tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fakevllm_server.forest.consecutive_nodes import Slices


@dataclass(frozen=True, slots=True)
class Edges:
    """The heads (rows of logits, each computed at one node) and the edges (tokens, each predicted
    by a head) of a forest.

    Heads and edges are sorted by temperature, then by allowed set, by predicting node, and by
    predicted node. Consecutive heads therefore have consecutive edges. A caller can compute the
    logits for one chunk of heads at a time:

        logits = lm_head(hidden[head_node]) / head_temperature[:, None]     [heads, vocabulary]
        logits[h] = -inf outside the set sets[head_set[h]]
        edge_logp = log_softmax(logits, -1)[edge_head, edge_token]          [edges]
        call_logp = edge_logp[per_call[i]]                                  [trained tokens of i]
    """

    head_node: array[int]
    """[heads] Node whose hidden state gives the row of logits."""
    head_temperature: array[float]
    """[heads] Temperature of the logits. Hidden states do not depend on the temperature, so calls
    with different temperatures share a tree. A node that predicts at two temperatures has two
    heads."""
    head_set: array[int]
    """[heads] Index in `sets` of the allowed tokens, or -1 for the whole vocabulary. Hidden states
    do not depend on the allowed tokens either."""
    sets: Sequence[bytes]
    """The distinct allowed sets, in the format of `CallTokens.allowed_sets`."""
    head_start: array[int]
    """[heads + 1] The edges of head h are [head_start[h], head_start[h + 1]). Each head has at
    least one edge."""
    edge_head: array[int]
    """[edges] Index of the head that predicts the token."""
    edge_token: array[int]
    """[edges] Id of the predicted token."""
    edge_node: array[int]
    """[edges] Node of the predicted token; its parent is the head's node."""
    per_call: Sequence[array[int]]
    """For each call, the edges of its trained tokens in order. If an array has a value for each
    edge, these indices select the values of the call."""

    @property
    def num_edges(self) -> int:
        return len(self.edge_head)

    @property
    def num_heads(self) -> int:
        return len(self.head_node)


@dataclass(frozen=True, slots=True)
class TrainedSpans:
    """The trained tokens of one call, as spans of positions in the call. All of these tokens have
    the same temperature."""

    path: Slices
    """The nodes of the call in order, as ranges [start, end)."""
    spans: Sequence[tuple[int, int]]
    """Ranges [start, end) of positions along `path` at which tokens are trained."""
    temperature: float
    allowed_sets: Sequence[bytes | None] | None = None
    """The set of allowed tokens for each position; None for the whole vocabulary."""

    def runs(self) -> Iterator[tuple[_HeadKind, int, int]]:
        """Yield the trained tokens as ranges of nodes, in order of position. A node is one token of
        the forest.

        Each result is a tuple (kind, begin, end) for the nodes from `begin` up to, but not
        including, `end`. The kind is (temperature, set of allowed tokens), and is the same for all
        tokens of the range.
        """
        for first, last in self.spans:
            for allowed, start, stop in _runs_of_equal_sets(self.allowed_sets, first, last):
                for begin, end in _nodes_at(self.path, start, stop):
                    yield (self.temperature, allowed), begin, end


def find_edges(
    trained: Sequence[TrainedSpans],
    ids: array[int],
    parent: array[int],
    segment_starts: Sequence[int],
) -> Edges:
    """Return the heads (rows of logits) and edges (predicted tokens) for the trained tokens of all
    calls.

    `ids` has the token id of each node, and `parent` has the parent of each node. `segment_starts`
    has the first node of each segment (a part of the forest without a branch), in ascending order.
    No trained span may contain position 0, because no node predicts the first token.
    """
    builder = _EdgeBuilder(ids)
    runs = [list(call.runs()) for call in trained]
    by_kind: defaultdict[_HeadKind, list[tuple[int, int]]] = defaultdict(list)
    for call_runs in runs:
        for kind, start, end in call_runs:
            by_kind[kind].append((start, end))
    edge_index: dict[_HeadKind, _EdgeIndex] = {}
    for kind in sorted(by_kind, key=_sort_key):
        links = sorted(_links(_merge_ranges(by_kind[kind]), parent, segment_starts))
        edge_index[kind] = builder.add(links, kind)
    builder.head_start.append(len(builder.edge_head))
    per_call = [array("q") for _ in trained]
    for call_runs, edges in zip(runs, per_call, strict=True):
        for kind, start, end in call_runs:
            edge_index[kind].append_edges(start, end, edges)
    return Edges(
        builder.head_node,
        builder.head_temperature,
        builder.head_set,
        list(builder.sets),
        builder.head_start,
        builder.edge_head,
        builder.edge_token,
        builder.edge_node,
        per_call,
    )


_HeadKind = tuple[float, bytes | None]
"""Temperature and allowed set of a head."""
_Link = tuple[int, int, int]
"""A tuple (head, node, length). For each i < length, node number head + i predicts the token of
node number node + i. The length is above 1 only inside a segment. Therefore no other link has a
head among the predicting nodes of such a link."""


class _EdgeIndex:
    """A table of the edges (predictions of one token each) that have one temperature and one set of
    allowed tokens. The table maps each node (token of the forest) to the edge that predicts it."""

    def __init__(self, runs: list[tuple[int, int, int]]) -> None:
        """Create the table. Each tuple (first node, number of nodes, first edge) in `runs`
        describes a range of consecutive nodes. The edges that predict these nodes are consecutive
        too."""
        self._runs = sorted(runs)
        self._firsts = [first for first, _, _ in self._runs]

    def append_edges(self, start: int, end: int, edges: array[int]) -> None:
        """Append to `edges` the indices of the edges (predictions of one token each) that predict
        the nodes [start, end) of the forest."""
        index = bisect_right(self._firsts, start) - 1
        while start < end:
            first, length, edge = self._runs[index]
            stop = min(end, first + length)
            edges.extend(range(edge + start - first, edge + stop - first))
            start, index = stop, index + 1


class _EdgeBuilder:
    """Collects the arrays of an Edges object."""

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids
        self.head_node, self.head_start = array("q"), array("q")
        self.head_temperature = array("d")
        self.head_set = array("q")
        self.sets: dict[bytes, int] = {}
        self.edge_head, self.edge_token, self.edge_node = array("q"), array("q"), array("q")

    def add(self, links: Sequence[_Link], kind: _HeadKind) -> _EdgeIndex:
        """Append the edges (predictions of one token each) that `links` describes, and the heads
        (rows of logits) from which they are predicted. A link is a range of consecutive edges. The
        links must be sorted and must not overlap. Return the table of the new edges. All new heads
        have the temperature and the set of allowed tokens of `kind`."""
        temperature, allowed = kind
        set_index = -1 if allowed is None else self.sets.setdefault(allowed, len(self.sets))
        runs: list[tuple[int, int, int]] = []
        last_head = -1
        for head, node, length in links:
            edge = len(self.edge_node)
            runs.append((node, length, edge))
            if head != last_head:
                self.head_start.extend(range(edge, edge + length))
                self.head_node.extend(range(head, head + length))
                self.head_temperature.extend(array("d", [temperature]) * length)
                self.head_set.extend(array("q", [set_index]) * length)
            num_heads = len(self.head_node)
            self.edge_head.extend(range(num_heads - length, num_heads))
            self.edge_node.extend(range(node, node + length))
            self.edge_token.extend(self._ids[node : node + length])
            last_head = head + length - 1
        return _EdgeIndex(runs)


def _sort_key(kind: _HeadKind) -> tuple[float, bytes]:
    temperature, allowed = kind
    return temperature, allowed or b""


def _runs_of_equal_sets(
    allowed_sets: Sequence[bytes | None] | None, first: int, last: int
) -> Iterator[tuple[bytes | None, int, int]]:
    """Divide the positions [first, last) into ranges of consecutive positions that have the same
    set of allowed tokens. Yield each range as (set, start, end)."""
    if allowed_sets is None:
        yield None, first, last
        return
    start = first
    for at in range(first + 1, last + 1):
        if at == last or allowed_sets[at] != allowed_sets[start]:
            yield allowed_sets[start], start, at
            start = at


def _nodes_at(path: Slices, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the nodes (tokens of the forest) at the positions [first, last) of a call. `path` has
    all nodes of the call, in order. `path` and the results consist of ranges [start, end) of
    consecutive nodes."""
    offset = 0
    for start, end in path:
        begin, stop = max(first - offset, 0), min(last - offset, end - start)
        if begin < stop:
            yield start + begin, start + stop
        offset += end - start


def _merge_ranges(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of the ranges in `runs` as disjoint ranges in ascending order."""
    union: list[tuple[int, int]] = []
    for start, end in sorted(runs):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _links(
    runs: Sequence[tuple[int, int]], parent: array[int], segment_starts: Sequence[int]
) -> Iterator[_Link]:
    """Yield the links that end at the nodes in `runs`. A node is one token of the forest, and
    `runs` has ranges [start, end) of nodes. A link is a tuple (first predicting node, first
    predicted node, length). A link covers `length` consecutive pairs of a predicting node and the
    node that it predicts.

    Each node is predicted by its parent. In a segment (a range of nodes without a branch), the
    parent is the preceding node. The parent of a segment's first node is in another segment.
    """
    for start, end in runs:
        index = bisect_left(segment_starts, start)
        while start < end:
            if index < len(segment_starts) and segment_starts[index] == start:
                yield parent[start], start, 1
                start, index = start + 1, index + 1
                continue
            stop = min(end, segment_starts[index]) if index < len(segment_starts) else end
            yield start - 1, start, stop - start
            start = stop
