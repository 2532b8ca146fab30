"""The pages Sessions (the latest conversations) and Session (one conversation as a tree)."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.ledger.session_outline import OutlineItem, outline
from fakevllm.sessions.types import Kind

NUM_SESSIONS = 100
"""Number of sessions on the page."""
MAX_GROUPS = 2_000
"""Maximum number of groups on the page of one session. An agent's session may have far more."""
NUM_FAST_GROUPS = 200
"""Number of groups of a session whose page is updated at once. A larger page is updated less often,
because it would keep the browser busy."""
SLOW_INTERVAL_S = 20
KIND_NAMES: dict[str, str] = {
    Kind.NEW: "",
    Kind.CONTINUES: "",
    Kind.SUB_AGENT: "sub-agent",
    Kind.REGENERATES: "another answer",
    Kind.REPEATS: "retry after a failure",
    Kind.EDITS: "edited message",
    Kind.COMPACTED: "shortened history",
    Kind.PARALLEL: "in parallel",
    Kind.SIDE: "side call",
}
"""Names of the kinds of requests. The usual kinds have no name."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the pages Sessions and Session."""
    routes = APIRouter()

    @routes.get("/sessions")
    def sessions(request: Request) -> Response:
        with parts.ledger.reading():
            rows = parts.ledger.sessions.latest(NUM_SESSIONS)
        return parts.page(
            request, "sessions.html", rows=rows, limit=NUM_SESSIONS, names=parts.app_names()
        )

    @routes.get("/sessions/{session_id:path}")
    def session(request: Request, session_id: str) -> Response:
        with parts.ledger.reading():
            groups = parts.ledger.sessions.latest_groups(session_id, MAX_GROUPS)[::-1]
            children = parts.ledger.sessions.children(session_id)
            marks = parts.ledger.feedback.marks_of_session(session_id, MAX_GROUPS)
        if not groups:
            message = "The ledger has no session with this id: it may be in another ledger."
            return parts.page(request, "message.html", status=404, message=message)
        items = outline(groups, children[:MAX_GROUPS])
        return parts.page(
            request,
            "session.html",
            session_id=session_id,
            items=items,
            has_branches=has_branches(items),
            newest_id=groups[-1].group_id,
            num_groups=len(groups),
            num_turns=max(group.turn for group in groups),
            parent_session_id=groups[0].parent_session_id,
            app=parts.app_name(groups[0].app_key),
            kind_names=KIND_NAMES,
            marks={mark.group_id: mark.text for mark in marks if mark.text},
            is_cut=len(groups) == MAX_GROUPS,
            interval_s=0 if len(groups) <= NUM_FAST_GROUPS else SLOW_INTERVAL_S,
        )

    return routes


def has_branches(items: Sequence[OutlineItem]) -> bool:
    """Return whether a request of the session is not on the branch of the latest request. Side
    calls and sub-agents are not branches.

    >>> has_branches([OutlineItem(agent_session_id="s")])
    False
    """
    return any(
        item.below or (item.group is not None and not item.is_live and item.group.kind != Kind.SIDE)
        for item in items
    )
