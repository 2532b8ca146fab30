"""The pages Evaluations (all measurements on held-out rows) and Evaluation (one of them)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.sources.evaluation_results import EvaluationResult
from fakevllm.console.sources.shared_evaluations import MAX_LATEST, SharedEvaluations
from fakevllm.statistics.confidence_sequence import RewardRange

MAX_ROWS = 20_000
"""Maximum number of evaluated rows of one evaluation that are read."""
ROWS_PER_PAGE = 200
"""Number of rows on the page of one evaluation."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the pages Evaluations and Evaluation."""
    routes = APIRouter()
    declared = RewardRange(*parts.settings.reward_range)
    shared = SharedEvaluations(parts.ledger, declared)

    @routes.get("/evaluations")
    def evaluations(request: Request) -> Response:
        with parts.ledger.reading():
            latest = shared.latest()
        return parts.page(
            request,
            "evaluations.html",
            results=latest.results,
            is_cut=latest.is_cut,
            limit=MAX_LATEST,
        )

    @routes.get("/evaluations/{eval_id:path}")
    def evaluation(request: Request, eval_id: str, rows_from: str = "") -> Response:
        with parts.ledger.reading():
            groups = parts.ledger.evaluations.evaluation(eval_id, MAX_ROWS)
        if not groups:
            message = "The ledger has no evaluation with this id: it may be in another ledger."
            return parts.page(request, "message.html", status=404, message=message)
        result = EvaluationResult(eval_id, groups, declared)
        start = _number(rows_from, len(result.rows))
        return parts.page(
            request,
            "evaluation.html",
            result=result,
            rows=result.rows[start : start + ROWS_PER_PAGE],
            start=start,
            per_page=ROWS_PER_PAGE,
            num_rows=len(result.rows),
            is_cut=len(groups) == MAX_ROWS,
        )

    return routes


def _number(text: str, most: int) -> int:
    """Return the number in `text`, at most `most`, or 0 if `text` is not a non-negative integer.

    >>> _number("200", 1000), _number("-1", 1000), _number("9" * 5000, 1000)
    (200, 0, 1000)
    """
    if not (text.isascii() and text.isdigit()):
        return 0
    return most if len(text) > len(str(most)) else min(int(text), most)
