"""Asks the model for one sibling, and asks again while the model is away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.transport.app_response import AppReply
from fakevllm.transport.engine_client import Reply, Upstream
from fakevllm.transport.relay import Lead, relay
from fakevllm.transport.request import Plan, Request, SiblingResult, sample, sibling_headers
from fakevllm.transport.retry import Lifeline
from fakevllm_adapters.protocol.errors import WireError


@dataclass(frozen=True, slots=True)
class Sampler:
    upstream: Upstream
    lifeline: Lifeline
    temperature: float
    """Of the siblings."""

    async def sample(
        self, request: Request, plan: Plan, index: int, app: AppReply
    ) -> SiblingResult:
        """A whole answer, or what came instead; the app is not told yet. A lead for which ours are
        too many waits; a sibling does not."""
        last = SiblingResult(index)
        room = self.lifeline.room

        async def ask(request: Request, is_by_us: Callable[[], bool]) -> SiblingResult:
            nonlocal last
            last = await sample(self.upstream, request, plan, index, self.temperature)
            if index > 0 and last.is_too_much:
                room.refused()
                return last
            if (outage := last.outage) is not None:
                raise outage
            if last.told is not None and last.is_too_much and is_by_us():
                raise last.told
            return last

        with room.with_engine() if index > 0 else contextlib.nullcontext():
            try:
                return await self.lifeline.held(request, app, ask)
            except WireError as error:
                return last if last.outage is not None else SiblingResult(index, error=error)

    async def relay(
        self, request: Request, plan: Plan, app: AppReply, on_first_token: Callable[[], None]
    ) -> Reply:
        """The lead's answer, which the app gets as it comes. Raises WireError while the app has got
        nothing of it."""

        async def ask(request: Request, is_by_us: Callable[[], bool]) -> Reply:
            body = plan.body(request, 0, self.temperature)
            lead = Lead(body, sibling_headers(request, 0), on_first_token)
            return await relay(self.upstream, request, app, lead, is_by_us=is_by_us)

        return await self.lifeline.held(request, app, ask)
