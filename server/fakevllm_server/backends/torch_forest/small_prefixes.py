"""Which trees are worth their sharing. Pure.

A token shared by all calls, such as the one that begins every prompt, saves next to nothing, while
every node below all but its heaviest child pays for another partial attention, and pieces cannot be
cut there for free.
Trees whose top saves less than that come apart: their calls get root keys of their own. Any choice
trains the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fakevllm_server.forest import CallTokens, Forest, Segment, build_forest
from fakevllm_server.forest.slices import Slices

SHARE_OF_A_TOKEN = 0.1
"""What another partial attention costs a node, as a part of all it costs, at most: on a CPU and
small models, where it is dearest."""

MAX_PEELS = 8
"""Each plants all calls again; what is left shared costs a little, and trains the same."""


def unshare_small_prefixes(calls: Sequence[CallTokens]) -> list[CallTokens]:
    """The same calls, with other root keys where that is cheaper. Call it before `pack`."""
    kept = list(calls)
    for _ in range(MAX_PEELS):
        forest = build_forest(kept)
        tops = _not_worth(forest)
        if not tops:
            break
        kept = [
            replace(call, root=(call.root, _branch(path, tops)))
            if path and path[0][0] in tops
            else call
            for call, path in zip(kept, forest.paths, strict=True)
        ]
    return kept


def _not_worth(forest: Forest) -> dict[int, Segment]:
    """By their first node. A tree without branches has nothing to part."""
    return {
        top.start: top
        for top in forest.segments
        if top.parent < 0
        and top.children
        and (top.end - top.start) * (len(top.children) - 1)
        < SHARE_OF_A_TOKEN * (top.tout - forest.segments[top.children[1]].start)
    }


def _branch(path: Slices, tops: Mapping[int, Segment]) -> int:
    """The node a call goes on with behind its tree's top; that top's own for one that does not."""
    start, end = path[0]
    top = tops[start]
    if end > top.end:
        return top.end
    return path[1][0] if len(path) > 1 else start
