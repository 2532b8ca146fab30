"""Sample one sibling (one of the answers that are sampled for a request), and retry while the
engine is unavailable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse
from fakevllm.transport.relay import LeadCall, relay
from fakevllm.transport.request import (
    Request,
    SiblingPlan,
    SiblingResult,
    begin_traced_call,
    sample,
    sibling_headers,
)
from fakevllm.transport.request_arm import with_policy
from fakevllm.transport.retry_handler import AttemptContext, RetryHandler
from fakevllm.transport.shared_call import broken_off, sample_shared
from fakevllm_adapters.protocol.errors import WireError


@dataclass(frozen=True, slots=True)
class Sampler:
    """A client of the engine that samples siblings. Siblings are the answers that are sampled for
    one request."""

    upstream: EngineClient
    retry_handler: RetryHandler
    temperature: float
    """Sampling temperature of all siblings except the lead (the app's own request)."""

    async def sample(
        self, request: Request, plan: SiblingPlan, index: int, app: AppResponse
    ) -> SiblingResult:
        """Sample the sibling (one of the answers to the request) with this index. Return its
        complete answer, or an error. No part of the answer is sent to the app.

        The engine may refuse a call because siblings overload the engine. If the refused call is
        the lead (the app's own request), this method waits and retries. If the refused call is
        another sibling, the engine's error is returned at once.
        """
        last = SiblingResult(index)
        sibling_limit = self.retry_handler.sibling_limit
        is_lead = index == 0

        async def call(request: Request, context: AttemptContext) -> SiblingResult:
            nonlocal last
            begin_traced_call(request, plan, (index,), self.temperature)
            with contextlib.nullcontext() if is_lead else sibling_limit.sampling():
                last = await sample(self.upstream, request, plan, index, self.temperature)
            if last.is_busy and not is_lead:
                sibling_limit.engine_refused()
                return last
            if (outage := last.outage) is not None:
                raise outage
            if last.upstream_error is not None and last.is_busy and context.is_caused_by_siblings():
                raise last.upstream_error
            return last

        try:
            return await self.retry_handler.retry_until_answered(
                request, app, call, is_lead=is_lead
            )
        except WireError as error:
            return last if last.outage is not None else SiblingResult(index, error=error)

    def calls(
        self, request: Request, plan: SiblingPlan, indices: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Divide siblings (answers to sample) into calls to the engine. `indices` has the index of
        each sibling. The result has one tuple for each call, with the indices of the siblings that
        this call samples."""
        can_share = self._server_shares_calls and request.is_captured
        max_per_call = self.retry_handler.slots.max_per_call if can_share else 1
        return plan.calls(request, indices, self.temperature, max_per_call)

    @property
    def _server_shares_calls(self) -> bool:
        return self.retry_handler.server_shares_calls

    async def sample_shared(
        self,
        request: Request,
        plan: SiblingPlan,
        indices: Sequence[int],
        app: AppResponse,
        on_result: Callable[[SiblingResult], None],
    ) -> None:
        """Sample several siblings (answers to the same request) with one call to the engine. Call
        `on_result` with each sibling's result as soon as the result is known.

        If the call fails before any sibling is complete, the call is retried, as `sample` does for
        one sibling. If the call fails later, the siblings without a complete answer fail at once.

        Raises NotShared if each sibling needs a call of its own. In this case, `on_result` was not
        called.
        """
        sibling_limit = self.retry_handler.sibling_limit
        missing = list(indices)
        outage_results: list[SiblingResult] = []
        error = broken_off()

        async def call(request: Request, context: AttemptContext) -> None:
            nonlocal error
            if len(missing) < len(indices):  # the watchdog ended the call
                return
            try:
                await attempt(request, context)
            except WireError as failure:
                if len(missing) == len(indices):
                    raise
                error = failure

        async def attempt(request: Request, context: AttemptContext) -> None:
            outage: WireError | None = None
            outage_results.clear()
            begin_traced_call(request, plan, indices, self.temperature)
            with sibling_limit.sampling(len(indices)) as end_one:
                results = sample_shared(self.upstream, request, plan, indices, self.temperature)
                async with aclosing(results):
                    async for result in results:
                        if result.is_busy:
                            sibling_limit.engine_refused()
                        elif result.outage is not None:
                            outage = outage or result.outage
                            outage_results.append(result)
                            continue
                        end_one()
                        context.give_back_slot()
                        missing.remove(result.index)
                        on_result(result)
            if outage is not None:
                raise outage

        try:
            await self.retry_handler.retry_until_answered(
                request, app, call, is_lead=False, num_slots=len(indices)
            )
        except WireError as last_error:
            error = last_error
        by_index = {result.index: result for result in outage_results}
        for index in missing:
            on_result(by_index.get(index) or SiblingResult(index, error=error))

    async def relay(
        self,
        request: Request,
        plan: SiblingPlan,
        app: AppResponse,
        on_first_token: Callable[[], None],
    ) -> EngineResponse:
        """Sample the lead (the app's own request), and return the engine's response. Stream the
        answer to the app as it arrives.

        Raises WireError if the lead fails before any part of the answer has been sent to the app.
        """

        async def call(request: Request, context: AttemptContext) -> EngineResponse:
            begin_traced_call(request, plan, (0,), self.temperature)

            async def attempt() -> EngineResponse:
                body = plan.body(request, 0, self.temperature)
                lead = LeadCall(body, sibling_headers(request, 0), on_first_token)
                return await relay(
                    self.upstream,
                    request,
                    app,
                    lead,
                    is_caused_by_siblings=context.is_caused_by_siblings,
                )

            return await with_policy(request.arm, attempt)

        return await self.retry_handler.retry_until_answered(request, app, call)
