"""The page Learning: the rewards of the policy, of the served answers and of the arms, the results
on held-out rows, and what learning costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.curve_summary import averages, both_ends, finished_points
from fakevllm.console.sources.curve_points import SharedCurve
from fakevllm.console.sources.held_out_results import HeldOutResult, held_out_results
from fakevllm.console.sources.shared_evaluations import SharedEvaluations
from fakevllm.ledger.curve_reads import CurvePoint
from fakevllm.ledger.learning_costs import LearningCosts
from fakevllm.statistics.confidence_sequence import RewardRange

NUM_TABLE_ROWS = 20
"""Number of latest points in the table, and of latest results on held-out rows."""
CHART_FIELDS = ("first_step", "last_step", "policy_mean", "returned_best", "changed")
"""Fields of a point that the chart needs."""
MAX_RUNS = 50
"""Maximum number of runs that can be chosen."""


@dataclass(frozen=True, slots=True)
class RunView:
    """What the page shows of one training run."""

    runs: Sequence[str]
    """Ids of all runs, newest first."""
    run_id: str | None
    """Id of the run that is shown. None if there is no such run."""
    points: Sequence[CurvePoint]
    """The curve of the finished steps."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Learning."""
    routes = APIRouter()
    shared_curve = SharedCurve(parts.ledger)
    evaluations = SharedEvaluations(parts.ledger, RewardRange(*parts.settings.reward_range))

    def read(run: str | None) -> RunView:
        """Return the newest run whose id is `run` or begins with it, and its curve."""
        with parts.ledger.reading():
            runs = parts.ledger.summary.runs()
            run_id = chosen_run(runs, run)
            points = [] if run_id is None else shared_curve.points(run_id)
        return RunView(
            runs, run_id, finished_points(points, run_id or "", parts.proxy.view().engine)
        )

    def read_costs(run_id: str) -> LearningCosts:
        with parts.ledger.reading():
            return parts.ledger.summary.costs(run_id)

    def read_held_out(view: RunView) -> list[HeldOutResult]:
        """Return the results of the run on held-out rows, newest first."""
        run_id = view.run_id or ""
        with parts.ledger.reading():
            results = evaluations.latest().results
            steps = parts.ledger.summary.steps_of_versions(run_id) if results else {}
        # A run without a step has no curve, and is not among the runs of the ledger.
        is_only_run = len(view.runs) <= 1
        return list(held_out_results(results, run_id, steps, is_only_run=is_only_run))

    @routes.get("/learning")
    def learning(
        request: Request, run: str | None = None, steps: Literal["latest", "all"] = "latest"
    ) -> Response:
        view = read(run)
        points = view.points
        if run and view.run_id is None:
            message = "The ledger has no training run whose id begins like this."
            return parts.page(request, "message.html", status=404, message=message)
        held_out = read_held_out(view)
        marks = [mark for result in held_out if (mark := result.mark) is not None]
        shows_all = steps == "all"
        return parts.page(
            request,
            "learning.html",
            runs=view.runs[:MAX_RUNS],
            run_id=view.run_id,
            points=points,
            summary=both_ends(points),
            shown=points[::-1] if shows_all else points[: -NUM_TABLE_ROWS - 1 : -1],
            own_url=_url(view.run_id, steps),
            all_url=_url(view.run_id, "all"),
            changes=[point for point in points if point.changed],
            arm_rows=parts.proxy.view().arm_rows,
            held_out=held_out if shows_all else held_out[:NUM_TABLE_ROWS],
            num_held_out=len(held_out),
            # The newest result of a step is the last one, which is the one that the chart shows.
            marks_json=json.dumps(marks[::-1]),
            has_several_hooks=_has_several_hooks(held_out),
            costs=None if view.run_id is None else read_costs(view.run_id),
        )

    @routes.get("/learning/curve")
    def curve(run: str | None = None) -> list[dict[str, Any]]:
        points = read(run).points
        return [
            {name: getattr(point, name) for name in CHART_FIELDS} | {"policy_average": average}
            for point, average in zip(points, averages(points), strict=True)
        ]

    return routes


def _has_several_hooks(results: Sequence[HeldOutResult]) -> bool:
    return len({name for result in results for name in result.evaluation.hook_hashes}) > 1


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
