"""The page Tokens: the tokens of one answer, coloured by advantage or by log-probability. The page
Group loads it as a part of itself."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.sources.token_texts import EngineTokenTexts
from fakevllm.console.token_panel import (
    largest_advantage,
    missing_tokens,
    run_problem,
    shown_calls,
    shown_ids,
)
from fakevllm.tokens.colours import ColourBy
from fakevllm.tokens.detokenizer import TokenTexts
from fakevllm.tokens.html import LEGEND
from fakevllm.tokens.page import ledger_page


def router(parts: ConsoleParts) -> APIRouter:
    """Return the route of the page Tokens."""
    routes = APIRouter()
    engine_texts = EngineTokenTexts(parts.settings.server_url, parts.settings.server_key)

    @routes.get("/tokens/{group_id:path}")
    def tokens(request: Request, group_id: str, sibling: str = "") -> Response:
        with parts.ledger.reading():
            group = parts.ledger.groups.group(group_id)
            named = [one for one in group.siblings if str(one.index) == sibling] if group else []
            if group is None or not named:
                message = "The ledger has no answer of this group with this number."
                return parts.page(request, "message.html", status=404, message=message)
            index = named[0].index
            cause = parts.ledger.groups.deletion_cause(group_id)
            calls = parts.ledger.calls.by_sibling(group_id, sibling=index)
        (sample,) = ledger_page(group, calls, index).samples
        ids = shown_ids(sample)
        problem = run_problem(group, parts.server.view()) if ids else ""
        texts: TokenTexts = {}
        if ids and not problem:
            texts, problem = engine_texts.texts(ids, group.run_id)
        untrainable = {call.untrainable for call in calls.get(index, ())}
        has_advantage = sample.is_trained and sample.advantage is not None
        return parts.page(
            request,
            "tokens.html",
            group=group,
            sibling=named[0],
            calls=shown_calls(sample, texts, largest_advantage(group)) if ids else [],
            missing="" if ids else missing_tokens(group, cause, untrainable),
            problem=problem,
            by=ColourBy.ADVANTAGE if has_advantage else ColourBy.LOGPROB,
            legend=LEGEND,
        )

    return routes
