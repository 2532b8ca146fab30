"""The page Now: what the proxy and the server do, what waits, what is wrong, and the latest
requests."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from fakevllm.console import fleet_texts
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.sources.proxy_status import ProxyView
from fakevllm.errors import LedgerError
from fakevllm.ledger.group_reads import AppTraffic, GroupRow, GroupSearch
from fakevllm.ledger.records import FeedbackState, State

NUM_LATEST = 8
"""Number of latest requests on the page."""
TRAFFIC_S = 600
"""Seconds for which requests are counted as present traffic."""
MAX_COUNTED = 10_000
"""Maximum number of requests that are counted. The page shows `10000 or more` then."""
MAX_APPS = 20
"""Maximum number of apps on the page."""
MAX_CLIENTS = 20
"""Maximum number of clients on the page."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Now."""
    routes = APIRouter()

    @routes.get("/")
    def now(request: Request) -> Response:
        view = parts.proxy.view()
        server = parts.server.view()
        latest: list[GroupRow] = []
        apps: list[AppTraffic] = []
        num_recent: int | None = None
        ledger_error = ""
        now_s = time.time()
        try:
            with parts.ledger.reading():
                groups = parts.ledger.groups
                latest = groups.search(GroupSearch(), NUM_LATEST).rows
                num_recent = groups.num_since(now_s - TRAFFIC_S, MAX_COUNTED)
                apps = groups.apps_since(now_s - TRAFFIC_S, MAX_COUNTED)
        except LedgerError as error:  # translates: the rest of the page is shown
            ledger_error = str(error)
        clients = () if server.snapshot is None else server.snapshot.clients
        return parts.page(
            request,
            "now.html",
            proxy=view,
            server=server,
            recent_start=fleet_texts.recent_start(server, now_s),
            server_rows=list(fleet_texts.server_rows(server, now_s)),
            engines=list(fleet_texts.engine_rows(server)),
            clients=list(fleet_texts.client_rows(clients[:MAX_CLIENTS])),
            num_clients=len(clients),
            waiting=list(waiting(view)),
            latest=latest,
            apps=apps[:MAX_APPS],
            num_apps=len(apps),
            is_cut_by_app=sum(app.num_requests for app in apps) == MAX_COUNTED,
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
