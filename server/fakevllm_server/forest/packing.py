"""Divide calls into pieces whose forests fit a token budget.

All calls of a batch usually share some tokens, so the batch is one tree. A prefix that several
pieces share is computed once for each of them: N siblings with a prompt of P tokens and responses
of R tokens cost mP + NR tokens in m pieces, instead of P + NR. The calls are put into DFS order, in
which a call follows all calls that extend it. Then a cut between two neighbours costs the length of
their common prefix. The total size of the pieces is the size of the forest plus the costs of the
cuts, and the cheapest cuts within the budget are found exactly. They are at the top-most branches.
Trees and groups are not cut as long as they fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fakevllm_server.forest.trie import CallTokens, Forest, build_forest


@dataclass(frozen=True, slots=True)
class Piece:
    """Calls that the model computes together."""

    calls: Sequence[int]
    """Indices of calls, ascending. Call i of `forest` is the call with index calls[i]."""
    forest: Forest


def pack(
    calls: Sequence[CallTokens], max_tokens: int, groups: Sequence[Hashable] | None = None
) -> list[Piece]:
    """Divide calls into pieces of at most `max_tokens` nodes.

    Every call is in exactly one piece. A piece is larger than `max_tokens` only if one of its calls
    is larger. The largest piece comes first, so that a lack of memory appears at once. `groups` has
    the group of each call. A group is not cut if it can stay whole in DFS order. Raises ValueError
    if `max_tokens` is below 1.

    The denominators of a loss must be computed from the whole batch, not from a piece.

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
    """Return the piece with the chosen calls.

    The result of training does not depend on how calls are divided. `pack` finds a cheap division.
    """
    ascending = sorted(chosen)
    return Piece(ascending, build_forest([calls[index] for index in ascending]))


def _length(forest: Forest, call: int) -> int:
    """Return the number of tokens of a call."""
    return sum(end - start for start, end in forest.paths[call])


def _dfs_order(forest: Forest) -> tuple[list[int], list[int]]:
    """Return the calls in post-order of their last nodes, and how many tokens each shares with the
    call before it. In this order, a call shares with the call before it all tokens that it shares
    with any earlier call."""
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
    """Return how many nodes of a call's path are `last` or an ancestor of `last`. In the path, and
    in each of its slices, these nodes come first."""
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
    """Return for each call how many groups a cut before it divides."""
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
"""(number of groups cut, number of tokens computed again, number of pieces), compared in this
order."""


def _cheapest_runs(
    new: Sequence[int], shared: Sequence[int], num_groups_cut: Sequence[int], max_tokens: int
) -> list[tuple[int, int]]:
    """Return the cheapest division of the calls into runs [first, last), in order.

    The algorithm is dynamic programming over the position of the last cut. A run from call i to
    call j - 1 has shared[i] + new[i] + … + new[j - 1] nodes. This number grows as i decreases. For
    each j, the allowed starts i are those for which the number is at most `max_tokens`. The
    smallest allowed start never decreases as j grows. A monotonic queue therefore gives the
    cheapest allowed start.
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
    """Return whether a run of calls fits the budget. If the first call exceeds the budget alone,
    the run fits if the other calls add no node."""
    return num_nodes <= max(max_tokens, first_call)


def _fill_bins(
    runs: Sequence[tuple[int, int]], new: Sequence[int], shared: Sequence[int], max_tokens: int
) -> list[list[tuple[int, int]]]:
    """Combine small runs into pieces, by first-fit decreasing bin packing."""
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
