"""Divide calls into pieces whose forests fit a token budget.

A piece is a set of model calls that go through the model together. The forest of a piece has one
node for each distinct prefix of its calls. Therefore a common prefix is computed once in each
piece. For example, let N calls share a prompt of P tokens, and let each have a response of R
tokens. One piece with all calls has P + NR nodes. If the calls are divided into m pieces, the
pieces have mP + NR nodes in total.

`pack` finds the pieces in three stages:

1. Sort the calls in depth-first post-order, in which a call follows all calls that extend it.
2. Cut this order into runs of consecutive calls that fit the budget. The cost of a cut is the
   length of the prefix that the two calls at the cut share, because the cut makes the model compute
   this prefix twice. Dynamic programming finds the cheapest cuts. If the caller wants groups of
   calls to stay in one piece, the cuts that divide the fewest groups win, even if other cuts would
   save tokens.
3. Combine small runs into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fakevllm_server.forest.trie import CallTokens, Forest, build_forest


@dataclass(frozen=True, slots=True)
class Piece:
    """A set of model calls that go through the model together. Its forest has one node for each
    distinct prefix of these calls."""

    calls: Sequence[int]
    """Indices of calls, ascending. Call i of `forest` is the call with index calls[i]."""
    forest: Forest


def pack(
    calls: Sequence[CallTokens], max_tokens: int, groups: Sequence[Hashable] | None = None
) -> list[Piece]:
    """Divide calls into pieces (sets of calls that go through the model together), and return the
    pieces. A piece has at most `max_tokens` tokens. A prefix that several calls of the piece share
    counts once.

    Every call is in exactly one piece. A piece has more than `max_tokens` tokens only if a single
    call has more. The largest piece comes first, so that an out-of-memory error occurs as early as
    possible. `groups` has the group of each call. The calls of a group stay in one piece if they
    follow each other in depth-first order, and if one piece has room for all of them. Raises
    ValueError if `max_tokens` is below 1.

    If you train on the pieces, compute the denominators of the loss from all calls, and not
    separately for each piece.

    >>> calls = [CallTokens.of([1, 2], [3]), CallTokens.of([1, 2], [4]), CallTokens.of([5], [6])]
    >>> [piece.calls for piece in pack(calls, max_tokens=4)]
    [[0, 1], [2]]
    """
    if max_tokens < 1:
        raise ValueError(f"the budget of {max_tokens} tokens must be at least 1")
    forest = build_forest(calls)
    if forest.num_nodes <= max_tokens:
        return [Piece(list(range(len(calls))), forest)] if calls else []
    order, shared = _dfs_order(forest)
    new = [_length(forest, call) - common for call, common in zip(order, shared, strict=True)]
    group_order = [None] * len(new) if groups is None else [groups[call] for call in order]
    runs = _cheapest_runs(new, shared, _num_groups_cut(group_order), max_tokens)
    pieces = [
        build_piece(calls, [order[index] for run in bin_runs for index in range(*run)])
        for bin_runs in _fill_bins(runs, new, shared, max_tokens)
    ]
    return sorted(pieces, key=lambda piece: (-piece.forest.num_nodes, piece.calls[0]))


def build_piece(calls: Sequence[CallTokens], chosen: Sequence[int]) -> Piece:
    """Return a piece (a set of calls that go through the model together) with the calls at the
    indices `chosen`.

    Any division of the calls into pieces gives the same training result. The function `pack` finds
    a division with few nodes.
    """
    ascending = sorted(chosen)
    return Piece(ascending, build_forest([calls[index] for index in ascending]))


def _length(forest: Forest, call: int) -> int:
    return sum(end - start for start, end in forest.paths[call])


def _dfs_order(forest: Forest) -> tuple[list[int], list[int]]:
    """Return (order, shared) for the calls of a forest, which has one node for each distinct
    prefix.

    `order` has the indices of the calls, sorted by each call's last node, in depth-first
    post-order. `shared` has one number for each call in this order. The number is the length of the
    longest prefix that the call shares with any earlier call in the order. The directly preceding
    call always has this prefix too.
    """
    ends = [path[-1][1] - 1 if path else -1 for path in forest.paths]
    order = sorted(
        range(len(ends)),
        key=lambda call: (forest.tout[ends[call]] if ends[call] >= 0 else 0, -ends[call], call),
    )
    shared: list[int] = []
    last = -1
    for call in order:
        shared.append(_num_common(forest, call, last))
        last = ends[call]
    return order, shared


def _num_common(forest: Forest, call: int, last: int) -> int:
    """Return the number of nodes that two paths of the forest have in common at their beginning.
    The first path is the path of the call with the index `call`. The second path leads from the
    root to the node `last`."""
    common = 0
    for start, end in forest.paths[call]:
        if not start <= last < forest.tout[start]:
            break
        # Subtrees only get smaller along a slice, so bisection finds the last common node.
        low, high = start + 1, min(end, last + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if last < forest.tout[middle - 1] else (low, middle - 1)
        common += low - start
    return common


def _num_groups_cut(groups: Sequence[Hashable]) -> list[int]:
    """Return for each call the number of groups that are divided by a cut directly before this
    call. `groups` has the group of each call. The calls are in the order in which `pack` cuts
    them."""
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
"""Cost of a division: (number of groups divided, number of tokens computed again, number of runs),
compared in this order."""


def _cheapest_runs(
    new: Sequence[int], shared: Sequence[int], num_groups_cut: Sequence[int], max_tokens: int
) -> list[tuple[int, int]]:
    """Divide the sorted calls into consecutive runs at the lowest cost. The cost is the tuple
    (divided groups, tokens computed twice, number of runs), compared from left to right. Each run
    is an index range [first, last). The runs are returned in ascending order.

    shared[i] is the number of tokens that call i shares with the preceding call. new[i] is the
    number of the other tokens of call i. The run [i, j) has shared[i] + new[i] + … + new[j - 1]
    nodes. The run fits if this number is at most `max_tokens`. If call i alone has more tokens than
    `max_tokens`, the limit is the length of call i instead.

    The algorithm is dynamic programming over j, the end of the last run. For each j, the last run
    [i, j) may start at every i for which it fits. The cost of the best division of the first i
    calls is known, so the start i with the lowest total cost is chosen. The smallest start that
    fits never decreases as j grows. Therefore a monotonic queue of starts makes each step fast.
    """
    sums = [0, *accumulate(new)]
    best: list[_Cost] = [(0, 0, 0)]
    begins = [0]
    window: deque[tuple[_Cost, int]] = deque()
    low = 0
    for end in range(1, len(new) + 1):
        begin = end - 1
        groups, tokens, pieces = best[begin]
        at_cut = (num_groups_cut[begin], shared[begin]) if begin else (0, 0)
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
    # A call cannot be divided. If the first call alone, with `first_call` tokens, is longer than
    # `max_tokens`, its length is the limit instead.
    return num_nodes <= max(max_tokens, first_call)


def _fill_bins(
    runs: Sequence[tuple[int, int]], new: Sequence[int], shared: Sequence[int], max_tokens: int
) -> list[list[tuple[int, int]]]:
    """Combine small runs of calls into pieces (sets of calls that go through the model together) of
    at most `max_tokens` nodes. The method is first-fit decreasing bin packing. A run is an index
    range [first, last). Return a list of runs for each piece."""
    sizes = {run: shared[run[0]] + sum(new[run[0] : run[1]]) for run in runs}
    bins: list[list[tuple[int, int]]] = []
    free: list[int] = []
    for run in sorted(runs, key=lambda run: (-sizes[run], run)):
        size = sizes[run]
        fitting = next((index for index, left in enumerate(free) if size <= left), None)
        if fitting is None:
            bins.append([run])
            free.append(max_tokens - size)
        else:
            bins[fitting].append(run)
            free[fitting] -= size
    return bins
