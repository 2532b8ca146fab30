"""Split trees whose common prefix saves less than it costs. Pure.

A token shared by all calls, such as the one that begins every prompt, saves almost nothing. It
costs another partial attention for every node below all but the heaviest child, and pieces cannot
be cut there for free. If the top of a tree saves less than it costs, the calls below it get
different root keys, so that they no longer share the top. The training result is the same either
way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fakevllm_server.forest import CallTokens, Forest, Segment, build_forest
from fakevllm_server.forest.consecutive_nodes import Slices

SHARE_OF_A_TOKEN = 0.1
"""Upper bound of the cost of another partial attention, as a share of a node's total cost. It is
measured on a CPU with small models, where the share is largest."""

MAX_PEELS = 8
"""Maximum number of passes. Each pass builds the forest again. Prefixes that stay shared after the
last one cost a little time, but the training result is the same."""


def unshare_small_prefixes(calls: Sequence[CallTokens]) -> list[CallTokens]:
    """Return the same calls, with different root keys where that is cheaper. Call this function
    before `pack`."""
    kept = list(calls)
    for _ in range(MAX_PEELS):
        forest = build_forest(kept)
        tops = _unprofitable_tops(forest)
        if not tops:
            break
        kept = [
            replace(call, root=(call.root, _branch(path, tops)))
            if path and path[0][0] in tops
            else call
            for call, path in zip(kept, forest.paths, strict=True)
        ]
    return kept


def _unprofitable_tops(forest: Forest) -> dict[int, Segment]:
    """Return the top segments that save less than they cost, by their first node. The segment of a
    tree without branches is never among them."""
    return {
        top.start: top
        for top in forest.segments
        if top.parent < 0
        and top.children
        and (top.end - top.start) * (len(top.children) - 1)
        < SHARE_OF_A_TOKEN * (top.tout - forest.segments[top.children[1]].start)
    }


def _branch(path: Slices, tops: Mapping[int, Segment]) -> int:
    """Return the first node of a call's path after the top of its tree, or the top's first node if
    the path ends there."""
    start, end = path[0]
    top = tops[start]
    if end > top.end:
        return top.end
    return path[1][0] if len(path) > 1 else start
