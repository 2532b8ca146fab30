"""Asks the model for one sibling, and asks again while the model is away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.lifeline import Lifeline
from fakevllm.relay import Lead, relay
from fakevllm.reply import AppReply
from fakevllm.siblings import Plan, Request, SiblingResult, sample, sibling_headers
from fakevllm.upstream import Reply, Upstream
from fakevllm_adapters.errors import WireError


@dataclass(frozen=True, slots=True)
class Asking:
    upstream: Upstream
    lifeline: Lifeline
    temperature: float
    """Of the siblings."""

    async def sample(
        self, request: Request, plan: Plan, index: int, app: AppReply
    ) -> SiblingResult:
        """A whole answer, or what came instead; the app is not told yet."""
        last = SiblingResult(index)

        async def ask(request: Request) -> SiblingResult:
            nonlocal last
            last = await sample(self.upstream, request, plan, index, self.temperature)
            if (outage := last.outage) is not None:
                raise outage
            return last

        try:
            return await self.lifeline.held(request, app, ask)
        except WireError as error:
            return last if last.outage is not None else SiblingResult(index, error=error)

    async def relay(
        self, request: Request, plan: Plan, app: AppReply, on_first_token: Callable[[], None]
    ) -> Reply:
        """The lead's answer, which the app gets as it comes. Raises WireError while the app has got
        nothing of it."""

        async def ask(request: Request) -> Reply:
            body = plan.body(request, 0, self.temperature)
            lead = Lead(body, sibling_headers(request, 0), on_first_token)
            return await relay(self.upstream, request, app, lead)

        return await self.lifeline.held(request, app, ask)
