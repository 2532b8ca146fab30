"""Calls into pieces whose forests fit a token budget.

All calls of a batch usually share a few tokens, so the batch is one tree, and a piece pays again
for the prefix it shares with another one: m pieces of siblings cost mP + NR tokens instead of
P + NR. In DFS order (calls that end on the way behind those that go on) a cut between two
neighbours costs their common prefix, the sum of all pieces is the forest's tokens plus the cuts'
costs, and the cheapest cuts within the budget are found exactly. They fall at the top-most
branches, and whole trees and groups stay together as long as they fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fakevllm_server.forest.trie import CallTokens, Forest, build_forest


@dataclass(frozen=True, slots=True)
class Piece:
    """Calls that go through the model together."""

    calls: Sequence[int]
    """Indices of calls, ascending; call i of `forest` is calls[i]."""
    forest: Forest


def pack(
    calls: Sequence[CallTokens], max_tokens: int, groups: Sequence[Hashable] | None = None
) -> list[Piece]:
    """Every call is in exactly one piece, and no piece has more than `max_tokens` nodes, but where
    one call alone has more. The largest piece comes first, so a lack of memory shows at once.
    `groups` gives each call's group: none is cut that can stay whole in DFS order.

    Denominators of a loss are of the whole batch, never of a piece.

    >>> calls = [CallTokens.of([1, 2], [3]), CallTokens.of([1, 2], [4]), CallTokens.of([5], [6])]
    >>> [piece.calls for piece in pack(calls, max_tokens=4)]
    [[0, 1], [2]]
    """
    if max_tokens < 1:
        raise ValueError(f"a budget of {max_tokens} tokens")
    forest = build_forest(calls)
    if forest.num_nodes <= max_tokens:
        return [Piece(list(range(len(calls))), forest)] if calls else []
    order, shared = _neighbours(forest)
    new = [_length(forest, call) - common for call, common in zip(order, shared, strict=True)]
    broken = _broken([groups[call] for call in order] if groups is not None else [None] * len(new))
    cuts = _cheapest_cuts(new, shared, broken, max_tokens)
    pieces = [
        build_piece(calls, [order[index] for run in joint for index in range(*run)])
        for joint in _filled(cuts, new, shared, max_tokens)
    ]
    return sorted(pieces, key=lambda piece: (-piece.forest.num_nodes, piece.calls[0]))


def build_piece(calls: Sequence[CallTokens], chosen: Sequence[int]) -> Piece:
    """Any choice of calls trains the same; `pack` makes a cheap one."""
    ascending = sorted(chosen)
    return Piece(ascending, build_forest([calls[index] for index in ascending]))


def _length(forest: Forest, call: int) -> int:
    return sum(end - start for start, end in forest.paths[call])


def _neighbours(forest: Forest) -> tuple[list[int], list[int]]:
    """Calls in post-order of the node they end in, and how many tokens each shares with the one
    before it: all those it shares with any before it."""
    ends = [path[-1][1] - 1 if path else -1 for path in forest.paths]
    order = sorted(
        range(len(ends)),
        key=lambda call: (forest.tout[ends[call]] if ends[call] >= 0 else 0, -ends[call], call),
    )
    shared: list[int] = []
    last = -1
    for call in order:
        shared.append(_common(forest, call, last))
        last = ends[call]
    return order, shared


def _common(forest: Forest, call: int, last: int) -> int:
    """Nodes of a call's path at or above the node `last`. Of a path they are the first ones, and
    in each of its slices too."""
    common = 0
    for start, end in forest.paths[call]:
        if not start <= last < forest.tout[start]:
            break
        # Slices run down heavy children, so the visible ones end by bisection on the subtree.
        low, high = start + 1, min(end, last + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if last < forest.tout[middle - 1] else (low, middle - 1)
        common += low - start
    return common


def _broken(groups: Sequence[Hashable]) -> list[int]:
    """How many groups a cut before each call goes through."""
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for index, group in enumerate(groups):
        first.setdefault(group, index)
        last[group] = index
    steps = [0] * (len(groups) + 1)
    for group, index in first.items():
        steps[index + 1] += 1
        steps[last[group] + 1] -= 1
    return list(accumulate(steps[: len(groups)]))


_Cost = tuple[int, int, int]
"""(groups cut, tokens paid again, pieces), the first matters most."""


def _cheapest_cuts(
    new: Sequence[int], shared: Sequence[int], broken: Sequence[int], max_tokens: int
) -> list[tuple[int, int]]:
    """Runs [first, last) of calls, in order. Shortest path over cuts; a piece that begins at call i
    and ends before call j has shared[i] + new[i] + … + new[j - 1] nodes, the more the earlier it
    begins, so what can begin is a window that only moves on."""
    sums = [0, *accumulate(new)]
    best: list[_Cost] = [(0, 0, 0)]
    begins = [0]
    window: deque[tuple[_Cost, int]] = deque()
    low = 0
    for end in range(1, len(new) + 1):
        begin = end - 1
        groups, tokens, pieces = best[begin]
        at_cut = (broken[begin], shared[begin]) if begin else (0, 0)
        cost = (groups + at_cut[0], tokens + at_cut[1], pieces + 1)
        while window and window[-1][0] >= cost:
            window.pop()
        window.append((cost, begin))
        while not _fits(shared[low] + sums[end] - sums[low], shared[low] + new[low], max_tokens):
            low += 1
        while window[0][1] < low:
            window.popleft()
        best.append(window[0][0])
        begins.append(window[0][1])
    runs: list[tuple[int, int]] = []
    end = len(new)
    while end:
        runs.append((begins[end], end))
        end = begins[end]
    return runs[::-1]


def _fits(num_nodes: int, first_call: int, max_tokens: int) -> bool:
    """A call beyond the budget goes with those that add nothing to it."""
    return num_nodes <= max(max_tokens, first_call)


def _filled(
    runs: Sequence[tuple[int, int]], new: Sequence[int], shared: Sequence[int], max_tokens: int
) -> list[list[tuple[int, int]]]:
    """Small pieces together, first fit decreasing by their tokens."""
    sizes = {run: shared[run[0]] + sum(new[run[0] : run[1]]) for run in runs}
    bins: list[list[tuple[int, int]]] = []
    room: list[int] = []
    for run in sorted(runs, key=lambda run: (-sizes[run], run)):
        size = sizes[run]
        fitting = next((index for index, left in enumerate(room) if size <= left), None)
        if fitting is None:
            bins.append([run])
            room.append(max_tokens - size)
        else:
            bins[fitting].append(run)
            room[fitting] -= size
    return bins
