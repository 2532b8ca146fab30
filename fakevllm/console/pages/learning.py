"""The page Learning: the rewards of the policy, of the served answers and of the arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.curve_summary import averages, both_ends, finished_points
from fakevllm.console.sources.curve_points import SharedCurve
from fakevllm.ledger.curve_reads import CurvePoint

NUM_TABLE_ROWS = 20
"""Number of latest points in the table."""
MAX_RUNS = 50
"""Maximum number of runs that can be chosen."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Learning."""
    routes = APIRouter()
    shared_curve = SharedCurve(parts.ledger)

    def read(run: str | None) -> tuple[list[str], str | None, Sequence[CurvePoint]]:
        """Return the ids of all runs, the id of the run to show, and the curve of its finished
        steps. If there is no run to show, its id is None."""
        with parts.ledger.reading():
            runs = parts.ledger.summary.runs()
            run_id = chosen_run(runs, run)
            points = [] if run_id is None else shared_curve.points(run_id)
        return runs, run_id, finished_points(points, run_id or "", parts.proxy.view().engine)

    @routes.get("/learning")
    def learning(
        request: Request, run: str | None = None, steps: Literal["latest", "all"] = "latest"
    ) -> Response:
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
            summary=both_ends(points),
            shown=points[::-1] if steps == "all" else points[: -NUM_TABLE_ROWS - 1 : -1],
            own_url=_url(run_id, steps),
            all_url=_url(run_id, "all"),
            changes=[point for point in points if point.changed],
            arm_rows=parts.proxy.view().arm_rows,
        )

    @routes.get("/learning/curve")
    def curve(run: str | None = None) -> list[dict[str, Any]]:
        points = read(run)[2]
        return [
            asdict(point) | {"policy_average": average}
            for point, average in zip(points, averages(points), strict=True)
        ]

    return routes


def _url(run_id: str | None, steps: str) -> str:
    """Return the address of the page with one run. The number of steps is in the address if it is
    not the default."""
    values = {} if run_id is None else {"run": run_id}
    if steps != "latest":
        values["steps"] = steps
    return "/learning" + (f"?{urlencode(values)}" if values else "")


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
