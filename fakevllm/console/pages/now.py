"""The page Now: what the proxy does, what waits, what is wrong, and the latest requests."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.sources.proxy_status import ProxyView
from fakevllm.errors import LedgerError
from fakevllm.ledger.group_reads import GroupRow, GroupSearch
from fakevllm.ledger.records import FeedbackState, State

NUM_LATEST = 8
"""Number of latest requests on the page."""
TRAFFIC_S = 600
"""Seconds for which requests are counted as present traffic."""
MAX_COUNTED = 10_000
"""Maximum number of requests that are counted. The page shows `10000 or more` then."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Now."""
    routes = APIRouter()

    @routes.get("/")
    def now(request: Request) -> Response:
        view = parts.proxy.view()
        latest: list[GroupRow] = []
        num_recent: int | None = None
        ledger_error = ""
        try:
            with parts.ledger.reading():
                latest = parts.ledger.groups.search(GroupSearch(), NUM_LATEST).rows
                num_recent = parts.ledger.groups.num_since(time.time() - TRAFFIC_S, MAX_COUNTED)
        except LedgerError as error:  # translates: the rest of the page is shown
            ledger_error = str(error)
        return parts.page(
            request,
            "now.html",
            proxy=view,
            waiting=list(waiting(view)),
            latest=latest,
            num_recent=num_recent,
            max_counted=MAX_COUNTED,
            traffic_minutes=TRAFFIC_S // 60,
            ledger_error=ledger_error,
            names=parts.app_names(),
        )

    return routes


def waiting(view: ProxyView) -> Iterator[tuple[str, int, str]]:
    """Yield (text, number, link) for the groups and the feedback that wait."""
    scored, pooled = view.counts.get(State.SCORED, 0), view.counts.get(State.POOLED, 0)
    if scored:
        yield "groups wait until the server acknowledges them", scored, "/groups?state=scored"
    if pooled:
        yield "groups wait for the next training step", pooled, "/groups?state=pooled"
    states = (FeedbackState.RECEIVED, FeedbackState.WAITING, FeedbackState.POOLED)
    if num := sum(view.feedback.get(state, 0) for state in states):
        yield "items of feedback wait to be trained", num, "/feedback"
