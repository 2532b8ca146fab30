"""A radix tree of token ids. The number of tokens is bounded, and the least recently used leaves
are evicted. The tree uses no tensors and no clock.

Each node has the token ids of one edge, and a payload for these ids, such as their keys and values.

Sequences that begin alike share the nodes of their common beginning. If a new sequence matches only
the first part of an edge, the tree splits the edge and its payload. Split payloads are never joined
again.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from typing import Generic, TypeVar

Payload = TypeVar("Payload")
_Key = tuple[bytes, int]


class _Node(Generic[Payload]):
    __slots__ = ("children", "ids", "is_queued", "key", "last_used", "parent", "payload")

    def __init__(
        self, key: _Key, ids: array[int], payload: Payload, parent: _Node[Payload] | None, now: int
    ) -> None:
        self.key = key
        self.ids = ids
        self.payload = payload
        self.parent = parent
        """None for a node at the top of the tree."""
        self.children: dict[_Key, _Node[Payload]] = {}
        self.last_used = now
        self.is_queued = False
        """Whether the node is in the heap of leaves."""


class RadixTree(Generic[Payload]):
    """A radix tree of token ids with payloads. `split(payload, length)` splits a payload: it
    returns the payload of the first `length` tokens and the payload of the other tokens."""

    def __init__(
        self, max_tokens: int, split: Callable[[Payload, int], tuple[Payload, Payload]]
    ) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Number of tokens on all edges. A token that several sequences share counts once."""
        self._split = split
        self._top: dict[_Key, _Node[Payload]] = {}
        self._now = 0
        self._heap: list[tuple[int, int, _Node[Payload]]] = []
        """A heap of leaves. The order is the time of last use that a leaf had when it was queued.
        If a leaf has been used after that, it is queued again, and not evicted, when it reaches the
        top."""

    def num_matching(self, ids: array[int], salt: bytes = b"") -> int:
        """Return the length of the longest beginning of `ids` that is in the tree. Only sequences
        that were inserted with the same `salt` are considered."""
        return sum(length for _, length in self._path(ids, salt))

    def match(self, ids: array[int], salt: bytes = b"") -> list[tuple[Payload, int]]:
        """Return the payloads along the longest beginning of `ids` that is in the tree, in order.
        Each payload comes with the number of its first tokens that match `ids`. The method marks
        the matched nodes as just used."""
        path = self._path(ids, salt)
        self._use(path)
        return [(node.payload, length) for node, length in path]

    def insert(
        self, ids: array[int], take: Callable[[int, int], Payload], salt: bytes = b""
    ) -> None:
        """Add a sequence. `take(begin, end)` returns the payload of ids[begin:end], and is called
        once if a part of the sequence is not in the tree yet. Then evict leaves until the tree has
        at most `max_tokens` tokens. A sequence of more than `max_tokens` tokens is not added."""
        if not ids or len(ids) > self.max_tokens:
            return
        path = self._path(ids, salt)
        begin = sum(length for _, length in path)
        parent = path[-1][0] if path else None
        if parent is not None and path[-1][1] < len(parent.ids) and begin < len(ids):
            parent = self._split_node(parent, path[-1][1])
            path[-1] = (parent, len(parent.ids))
        self._use(path)
        if begin == len(ids):
            return
        key = self._key(parent, ids[begin], salt)
        node = _Node(key, ids[begin:], take(begin, len(ids)), parent, self._now)
        self._siblings(node)[key] = node
        self.num_tokens += len(node.ids)
        self._queue(node)
        while self.num_tokens > self.max_tokens:
            self._evict()

    def clear(self) -> None:
        self._top.clear()
        self._heap.clear()
        self.num_tokens = 0

    def _path(self, ids: array[int], salt: bytes) -> list[tuple[_Node[Payload], int]]:
        """Follow `ids` down the tree as far as they match. Return the visited nodes, each with the
        number of its tokens that match. Only the last node may match partly."""
        path: list[tuple[_Node[Payload], int]] = []
        begin, node = 0, None
        while begin < len(ids):
            children = self._top if node is None else node.children
            node = children.get(self._key(node, ids[begin], salt))
            if node is None:
                break
            length = _common_length(node.ids, ids[begin : begin + len(node.ids)])
            path.append((node, length))
            begin += length
            if length < len(node.ids):
                break
        return path

    def _key(self, parent: _Node[Payload] | None, first_id: int, salt: bytes) -> _Key:
        return (salt if parent is None else b"", first_id)

    def _siblings(self, node: _Node[Payload]) -> dict[_Key, _Node[Payload]]:
        return self._top if node.parent is None else node.parent.children

    def _use(self, path: list[tuple[_Node[Payload], int]]) -> None:
        self._now += 1
        for node, _ in path:
            node.last_used = self._now

    def _split_node(self, node: _Node[Payload], length: int) -> _Node[Payload]:
        """Insert a new node above `node`. The new node takes the first `length` tokens of
        `node`. Return the new node."""
        first, rest = self._split(node.payload, length)
        upper = _Node(node.key, node.ids[:length], first, node.parent, node.last_used)
        self._siblings(node)[node.key] = upper
        node.ids, node.payload, node.parent = node.ids[length:], rest, upper
        node.key = self._key(upper, node.ids[0], b"")
        upper.children[node.key] = node
        return upper

    def _queue(self, node: _Node[Payload]) -> None:
        if not node.is_queued:
            node.is_queued = True
            # The id makes entries of the same time comparable.
            heapq.heappush(self._heap, (node.last_used, id(node), node))

    def _evict(self) -> None:
        """Remove the least recently used leaf."""
        while True:
            queued_at, _, node = heapq.heappop(self._heap)
            node.is_queued = False
            if node.children:
                continue
            if node.last_used == queued_at:
                break
            self._queue(node)
        del self._siblings(node)[node.key]
        self.num_tokens -= len(node.ids)
        if node.parent is not None and not node.parent.children:
            self._queue(node.parent)


def _common_length(one: array[int], other: array[int]) -> int:
    """Return the length of the common beginning of two sequences."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    # Comparing slices runs in C, so halving is faster than comparing ids one by one.
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
