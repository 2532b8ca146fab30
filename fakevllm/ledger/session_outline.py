"""The outline of a session: its requests as nested lists, one list for each branch of the
conversation. The module does no I/O.

A conversation without branches is one flat list. A branch begins where several requests continue
the same answer. All of these requests are in the same list. The list goes on with the requests that
follow one of them: the one on whose branch the latest request is. The requests that follow another
one are in a list of their own, below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fakevllm.ledger.session_reads import SessionGroup

MAX_DEPTH = 6
"""Maximum number of lists around a list. Branches that are nested more deeply are added to the list
at this depth, because a page or a terminal has no room for them."""
_SIDE = "side"
_SAME_TURN = ("continues", "parallel")
"""Kinds of requests that do not begin a turn if the number of the turn is that of the request
before."""


@dataclass(slots=True)
class OutlineItem:
    """One line of an outline: a request, or a sub-agent that the request before has started."""

    group: SessionGroup | None = None
    """The request. None for a sub-agent."""
    agent_session_id: str | None = None
    """Session of the sub-agent. None for a request."""
    is_new_turn: bool = True
    """Whether the request begins a turn. If not, it adds only a tool's result."""
    is_live: bool = False
    """Whether the request is on the branch of the latest request."""
    below: list[OutlineItem] = field(default_factory=list["OutlineItem"])
    """The lines that follow this request, if another request continues the list."""


def outline(
    groups: Sequence[SessionGroup], children: Iterable[tuple[str, str | None]] = ()
) -> list[OutlineItem]:
    """Return the outline of a session. `groups` are its requests, oldest first.

    `children` has one pair for each sub-agent that the session started. The pair is (id of the
    sub-agent's session, id of the request that started the sub-agent).
    """
    parents = _parents(groups)
    after: defaultdict[str | None, list[SessionGroup]] = defaultdict(list)
    for group in groups:
        after[parents[group.group_id]].append(group)
    agents: defaultdict[str | None, list[str]] = defaultdict(list)
    for session_id, parent_id in children:
        agents[parent_id if parent_id in parents else None].append(session_id)
    newest = _newest(groups, parents)
    root: list[OutlineItem] = []
    deepest: list[OutlineItem] = []
    # A loop, because recursion would exceed Python's limit in a conversation with many branches.
    work: list[tuple[list[OutlineItem], str | None, int, int]] = [(root, None, 0, 0)]
    while work:
        items, last_id, turn, depth = work.pop()
        while last_id in after or last_id in agents:
            items += [OutlineItem(agent_session_id=one) for one in agents.pop(last_id, [])]
            following = after.pop(last_id, [])
            mains = [group for group in following if group.kind != _SIDE]
            trunk = max(mains, key=lambda group: newest[group.group_id], default=None)
            for group in _last(following, trunk):
                item = OutlineItem(
                    group,
                    is_new_turn=group.turn != turn or group.kind not in _SAME_TURN,
                    is_live=depth == 0 and group is trunk,
                )
                items.append(item)
                if group is not trunk:
                    work.append((item.below, group.group_id, group.turn, depth + 1))
                    deepest += [item] if depth == MAX_DEPTH - 1 else []
            if trunk is None:
                break
            last_id, turn = trunk.group_id, trunk.turn
    for item in deepest:
        item.below = list(_flattened(item.below))
    return root


def _parents(groups: Sequence[SessionGroup]) -> dict[str, str | None]:
    """Return the id of the request after which each request is shown. It is None for a request that
    follows none of the earlier requests. A side call is shown by its time, because it may quote any
    part of the session."""
    parents: dict[str, str | None] = {}
    latest: str | None = None
    for group in groups:
        if group.kind == _SIDE:
            parents[group.group_id] = latest
        else:
            # Only an earlier request can be a parent, so a damaged ledger makes no circle.
            parents[group.group_id] = group.parent_id if group.parent_id in parents else None
            latest = group.group_id
    return parents


def _newest(groups: Sequence[SessionGroup], parents: dict[str, str | None]) -> dict[str, int]:
    """Return, for each request, the position of the latest request that follows it directly or
    through others. Side calls do not count."""
    newest: dict[str, int] = {}
    for position, group in reversed(list(enumerate(groups))):
        if group.kind == _SIDE:
            continue
        own = max(newest.get(group.group_id, 0), position)
        newest[group.group_id] = own
        parent_id = parents[group.group_id]
        if parent_id is not None:
            newest[parent_id] = max(newest.get(parent_id, 0), own)
    return newest


def _last(groups: Sequence[SessionGroup], trunk: SessionGroup | None) -> Iterator[SessionGroup]:
    """Yield the groups, and `trunk` as the last one: the groups after it follow directly."""
    yield from (group for group in groups if group is not trunk)
    if trunk is not None:
        yield trunk


def _flattened(items: Sequence[OutlineItem]) -> Iterator[OutlineItem]:
    """Yield the items and all items below them, in the order of the outline, without lists below
    them."""
    work = [*reversed(items)]
    while work:
        item = work.pop()
        work += reversed(item.below)
        item.below = []
        yield item
