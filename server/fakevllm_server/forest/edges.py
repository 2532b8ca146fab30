"""Which log-probabilities a forest has to give, each once, and which calls want them.

An edge is one token predicted from one node at one temperature, out of one set of tokens. Calls
that share it share its log-probability, and each keeps its own term of the loss: l_it =
l_edge(i,t), so the loss is the same function of the weights as the sum over calls, and the gradient
of the gather adds the calls' coefficients. Merging terms instead (first one wins, advantages
summed) is wrong for clipped losses.

Reckoned in runs of nodes, so Python's own steps are per span and segment, and per token only where
each is out of a set of its own.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fakevllm_server.forest.slices import Slices


@dataclass(frozen=True, slots=True)
class Edges:
    """Two levels: heads (rows of logits), and edges (one chosen token of a row).

    Sorted by temperature, then allowed set, then predicting node, then the node predicted; so the
    edges of a run of heads are a run of edges, and logits can be made a chunk of heads at a time.

        logits = lm_head(hidden[head_node]) / head_temperature[:, None]     [heads, vocabulary]
        logits[h] = -inf outside the set sets[head_set[h]]
        edge_logp = log_softmax(logits, -1)[edge_head, edge_token]          [edges]
        call_logp = edge_logp[per_call[i]]                                  [trained tokens of i]
    """

    head_node: array[int]
    """[heads] The node whose hidden state predicts."""
    head_temperature: array[float]
    """[heads] Hidden states are the same at every temperature, so calls that differ in it share a
    tree; only where both train on the same node has it two heads."""
    head_set: array[int]
    """[heads] Index of the set in `sets` that the token is one of, or -1 for all of the vocabulary.
    As with the temperature: the states are shared, the head is not."""
    sets: Sequence[bytes]
    """As the calls named them, each once."""
    head_start: array[int]
    """[heads + 1] The edges of head h are head_start[h] to head_start[h + 1], never none."""
    edge_head: array[int]
    """[edges]"""
    edge_token: array[int]
    """[edges]"""
    edge_node: array[int]
    """[edges] The node that holds the token; its parent is the head's node."""
    per_call: Sequence[array[int]]
    """For each call the edge of each of its trained tokens, in order: the gather that gives the
    calls their log-probabilities back."""

    @property
    def num_edges(self) -> int:
        return len(self.edge_head)

    @property
    def num_heads(self) -> int:
        return len(self.head_node)


@dataclass(frozen=True, slots=True)
class TrainedSpans:
    """What one call trains on: spans of positions along its path, at a temperature."""

    path: Slices
    spans: Sequence[tuple[int, int]]
    temperature: float
    chosen_from: Sequence[bytes | None] | None = None
    """By position along the path; None for all of the vocabulary."""

    def runs(self) -> Iterator[tuple[_Kind, int, int]]:
        """Spans of nodes with one kind of head, in the order of positions."""
        for first, last in self.spans:
            for allowed, start, stop in _alike(self.chosen_from, first, last):
                for begin, end in _nodes(self.path, start, stop):
                    yield (self.temperature, allowed), begin, end


def edges_of(
    wanted: Sequence[TrainedSpans],
    ids: array[int],
    parent: array[int],
    segment_starts: Sequence[int],
) -> Edges:
    """`ids` and `parent` are by node. Every span must start behind the first position."""
    growing = _Growing(ids)
    runs = [list(call.runs()) for call in wanted]
    by_kind: defaultdict[_Kind, list[tuple[int, int]]] = defaultdict(list)
    for own in runs:
        for kind, start, end in own:
            by_kind[kind].append((start, end))
    found: dict[_Kind, _Found] = {}
    for kind in sorted(by_kind, key=_rank):
        links = sorted(_links(_merged(by_kind[kind]), parent, segment_starts))
        found[kind] = growing.add(links, kind)
    growing.head_start.append(len(growing.edge_head))
    per_call = [array("q") for _ in wanted]
    for own, into in zip(runs, per_call, strict=True):
        for kind, start, end in own:
            found[kind].gather(start, end, into)
    return Edges(
        growing.head_node,
        growing.head_temperature,
        growing.head_set,
        list(growing.sets),
        growing.head_start,
        growing.edge_head,
        growing.edge_token,
        growing.edge_node,
        per_call,
    )


_Kind = tuple[float, bytes | None]
"""(temperature, allowed set) of a head."""
_Link = tuple[int, int, int]
"""(head, node, length): head + i predicts node + i. Longer than 1 only inside a segment, so no
other link has a head in between."""


class _Found:
    """Edges by node, of one kind of head."""

    def __init__(self, runs: list[tuple[int, int, int]]) -> None:
        """(first node, length, first edge) each."""
        self._runs = sorted(runs)
        self._firsts = [first for first, _, _ in self._runs]

    def gather(self, start: int, end: int, into: array[int]) -> None:
        index = bisect_right(self._firsts, start) - 1
        while start < end:
            first, length, edge = self._runs[index]
            stop = min(end, first + length)
            into.extend(range(edge + start - first, edge + stop - first))
            start, index = stop, index + 1


class _Growing:
    """The arrays of Edges, while they grow."""

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids
        self.head_node, self.head_start = array("q"), array("q")
        self.head_temperature = array("d")
        self.head_set = array("q")
        self.sets: dict[bytes, int] = {}
        self.edge_head, self.edge_token, self.edge_node = array("q"), array("q"), array("q")

    def add(self, links: Sequence[_Link], kind: _Kind) -> _Found:
        """`links` sorted, each node in one."""
        temperature, allowed = kind
        number = -1 if allowed is None else self.sets.setdefault(allowed, len(self.sets))
        found: list[tuple[int, int, int]] = []
        last_head = -1
        for head, node, length in links:
            edge = len(self.edge_node)
            found.append((node, length, edge))
            if head != last_head:
                self.head_start.extend(range(edge, edge + length))
                self.head_node.extend(range(head, head + length))
                self.head_temperature.extend(array("d", [temperature]) * length)
                self.head_set.extend(array("q", [number]) * length)
            num_heads = len(self.head_node)
            self.edge_head.extend(range(num_heads - length, num_heads))
            self.edge_node.extend(range(node, node + length))
            self.edge_token.extend(self._ids[node : node + length])
            last_head = head + length - 1
        return _Found(found)


def _rank(kind: _Kind) -> tuple[float, bytes]:
    temperature, allowed = kind
    return temperature, allowed or b""


def _alike(
    chosen_from: Sequence[bytes | None] | None, first: int, last: int
) -> Iterator[tuple[bytes | None, int, int]]:
    """Positions [first, last) in runs of one set."""
    if chosen_from is None:
        yield None, first, last
        return
    start = first
    for at in range(first + 1, last + 1):
        if at == last or chosen_from[at] != chosen_from[start]:
            yield chosen_from[start], start, at
            start = at


def _nodes(path: Slices, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The runs of nodes at positions [first, last) of a path, in order."""
    offset = 0
    for start, end in path:
        begin, stop = max(first - offset, 0), min(last - offset, end - start)
        if begin < stop:
            yield start + begin, start + stop
        offset += end - start


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
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
    """A segment's first node is predicted by a node of another segment, the others by the node
    before them."""
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
