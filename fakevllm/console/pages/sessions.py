"""The pages Sessions (the latest conversations) and Session (all groups of one conversation)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts

NUM_SESSIONS = 100
"""Number of sessions on the page."""
MAX_GROUPS = 500
"""Maximum number of groups on the page of one session. An agent's session may have far more."""


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
            groups = parts.ledger.sessions.latest_groups(session_id, MAX_GROUPS)
            children = parts.ledger.sessions.children(session_id)
        if not groups:
            message = "The ledger has no session with this id: it may be in another ledger."
            return parts.page(request, "message.html", status=404, message=message)
        return parts.page(
            request,
            "session.html",
            session_id=session_id,
            groups=groups,
            children=children[:MAX_GROUPS],
            parent_session_id=groups[-1].parent_session_id,
            app=parts.app_name(groups[-1].app_key),
            limit=MAX_GROUPS,
        )

    return routes
