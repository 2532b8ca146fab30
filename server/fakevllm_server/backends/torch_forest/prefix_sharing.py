"""Split a tree of calls if sharing the calls' common prefix costs more time than it saves.

Calls may share only a few first tokens, such as the token that begins every prompt. Sharing these
tokens saves almost nothing, but has two costs. The first cost is additional attention: at each
branch of the tree, all subtrees except the largest one need one more partial attention for each of
their tokens. A partial attention is attention to a part of a token's ancestors. The second cost
arises if the tree is cut into parts that go through the model separately. Each part then computes
the shared tokens again.

The top of a tree is the part before its first branch. If sharing the top costs more than it saves,
this module splits the tree into one tree for each branch. To do so, the module gives the calls of
each branch a root key of their own. Calls with different root keys share no tokens. The training
result does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fakevllm_server.forest import CallTokens, Forest, Segment, build_forest
from fakevllm_server.forest.consecutive_nodes import Slices

SHARE_OF_A_TOKEN = 0.1
"""If prefixes are shared, a node may need one more partial attention (attention to a part of its
ancestors). This value is an upper bound of the time that this partial attention takes, as a
fraction of the node's total time. The value was measured on a CPU with small models, where the
fraction is largest."""

MAX_PEELS = 8
"""Maximum number of passes over the calls. Each pass builds the forest again, and splits trees at
their tops. Prefixes that stay shared after the last pass cost a little time, but the training
result is the same."""


def unshare_small_prefixes(calls: Sequence[CallTokens]) -> list[CallTokens]:
    """Return the calls, some of them with new root keys. If sharing a small prefix costs more time
    than it saves, each branch after the prefix gets a root key of its own. Calls with different
    root keys share no tokens. Call this function before `pack`, which builds the trees of calls."""
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
    """Return the tops of trees for which sharing costs more time than it saves. The keys of the
    dict are the first nodes of the tops. The top of a tree is the part before its first branch.
    Trees without a branch are left out."""
    return {
        top.start: top
        for top in forest.segments
        if top.parent < 0
        and top.children
        and (top.end - top.start) * (len(top.children) - 1)
        < SHARE_OF_A_TOKEN * (top.tout - forest.segments[top.children[1]].start)
    }


def _branch(path: Slices, tops: Mapping[int, Segment]) -> int:
    """Return the number of a node (a token in the tree of calls) that identifies the branch of a
    call. The top of a tree is the part before its first branch. The result is the call's first node
    after the top. If the call ends inside the top, the result is the first node of the top."""
    start, end = path[0]
    top = tops[start]
    if end > top.end:
        return top.end
    return path[1][0] if len(path) > 1 else start
