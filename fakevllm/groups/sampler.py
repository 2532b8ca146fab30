"""Sampling of one sibling (one of the answers that are sampled for a request), with retries while
the engine is unavailable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse
from fakevllm.transport.relay import LeadCall, relay
from fakevllm.transport.request import Request, SiblingPlan, SiblingResult, sample, sibling_headers
from fakevllm.transport.retry_handler import RetryHandler
from fakevllm_adapters.protocol.errors import WireError


@dataclass(frozen=True, slots=True)
class Sampler:
    """A client of the engine that samples siblings (the answers that are sampled for one
    request)."""

    upstream: EngineClient
    retry_handler: RetryHandler
    temperature: float
    """Sampling temperature of all siblings except the lead (the app's own request)."""

    async def sample(
        self, request: Request, plan: SiblingPlan, index: int, app: AppResponse
    ) -> SiblingResult:
        """Sample the sibling with this index, and return its complete answer or an error. No part
        of the answer is sent to the app.

        The engine may refuse a call because it is overloaded by siblings. If the refused call is
        the lead (the app's own request), this method waits and retries. If the refused call is
        another sibling, the engine's error is returned at once.
        """
        last = SiblingResult(index)
        sibling_limit = self.retry_handler.sibling_limit
        is_lead = index == 0

        async def call(
            request: Request, is_caused_by_siblings: Callable[[], bool]
        ) -> SiblingResult:
            nonlocal last
            with contextlib.nullcontext() if is_lead else sibling_limit.sampling():
                last = await sample(self.upstream, request, plan, index, self.temperature)
            if last.is_busy and not is_lead:
                sibling_limit.engine_refused()
                return last
            if (outage := last.outage) is not None:
                raise outage
            if last.upstream_error is not None and last.is_busy and is_caused_by_siblings():
                raise last.upstream_error
            return last

        try:
            return await self.retry_handler.retry_until_answered(
                request, app, call, is_lead=is_lead
            )
        except WireError as error:
            return last if last.outage is not None else SiblingResult(index, error=error)

    async def relay(
        self,
        request: Request,
        plan: SiblingPlan,
        app: AppResponse,
        on_first_token: Callable[[], None],
    ) -> EngineResponse:
        """Sample the lead (the app's own request), stream its answer to the app as it arrives, and
        return the engine's response.

        Raises WireError if the lead fails before any part of the answer has been sent to the app.
        """

        async def call(
            request: Request, is_caused_by_siblings: Callable[[], bool]
        ) -> EngineResponse:
            body = plan.body(request, 0, self.temperature)
            lead = LeadCall(body, sibling_headers(request, 0), on_first_token)
            return await relay(
                self.upstream, request, app, lead, is_caused_by_siblings=is_caused_by_siblings
            )

        return await self.retry_handler.retry_until_answered(request, app, call)
