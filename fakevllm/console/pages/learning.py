"""The page Learning: the rewards of the policy, of the served answers and of the arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.curve_points import SharedCurve
from fakevllm.ledger.curve_reads import CurvePoint

NUM_TABLE_ROWS = 20
"""Number of latest points in the table."""
MAX_RUNS = 50
"""Maximum number of runs that can be chosen."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Learning."""
    routes = APIRouter()
    shared_curve = SharedCurve(parts.ledger)

    def read(run: str | None) -> tuple[list[str], str | None, list[CurvePoint]]:
        """Return the ids of all runs, the id of the run to show, and the curve of this run. If
        there is no run to show, its id is None."""
        with parts.ledger.reading():
            runs = parts.ledger.summary.runs()
            run_id = chosen_run(runs, run)
            points = [] if run_id is None else shared_curve.points(run_id)
        return runs, run_id, points

    @routes.get("/learning")
    def learning(request: Request, run: str | None = None) -> Response:
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
    def curve(run: str | None = None) -> list[dict[str, Any]]:
        return [asdict(point) for point in read(run)[2]]

    return routes


def chosen_run(runs: Sequence[str], run: str | None) -> str | None:
    """Return the run with the id `run`, or else the newest run whose id begins with `run`. `runs`
    are the ids of all runs, newest first. Servers without ids of runs have the id "".

    >>> chosen_run(["abcd", "abc", ""], "abc"), chosen_run(["abcd", "abc", ""], "")
    ('abc', '')
    >>> chosen_run(["abcd", "abc", ""], "abcd"), chosen_run(["abcd", "abc", ""], None)
    ('abcd', 'abcd')
    """
    if run in runs:
        return run
    return next((name for name in runs if name.startswith(run or "")), None)
