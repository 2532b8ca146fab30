"""The page Learning: the rewards of the policy, of the served answers and of the arms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.curve_points import CurvePoint, curve_points

NUM_TABLE_ROWS = 20
"""Number of latest points in the table."""
MAX_RUNS = 50
"""Maximum number of runs that can be chosen."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Learning."""
    routes = APIRouter()

    def read(run: str) -> tuple[list[str], str | None, list[CurvePoint]]:
        """Return the ids of all runs, the id of the newest run that begins with `run`, and its
        curve. The id is None if there is no such run."""
        with parts.ledger.reading():
            runs = parts.ledger.summary.runs()
            run_id = next((name for name in runs if name.startswith(run)), None)
            rows = [] if run_id is None else parts.ledger.summary.curve(run_id)
        return runs, run_id, curve_points(rows)

    @routes.get("/learning")
    def learning(request: Request, run: str = "") -> Response:
        runs, run_id, points = read(run)
        if run and run_id is None:
            message = "The ledger has no training run whose id begins like this."
            return parts.page(request, "message.html", status=404, message=message)
        return parts.page(
            request,
            "learning.html",
            runs=runs[:MAX_RUNS],
            run_id=run_id,
            points=points,
            latest=points[: -NUM_TABLE_ROWS - 1 : -1],
            changes=[point for point in points if point.changed],
            arm_rows=parts.proxy.view().arm_rows,
        )

    @routes.get("/learning/curve")
    def curve(run: str = "") -> list[dict[str, Any]]:
        return [asdict(point) for point in read(run)[2]]

    return routes
