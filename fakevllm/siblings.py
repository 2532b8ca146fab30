"""The siblings of one group: their bodies, and what became of each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from fakevllm.upstream import Reply, Upstream
from fakevllm_adapters.base import Adapter, Answer, Exchange, Json
from fakevllm_adapters.errors import WireError
from fakevllm_adapters.swarm import SIBLING_HEADER, SiblingRef

_REQUEST_ID = "X-Request-Id"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the app, decoded."""

    id: str
    adapter: Adapter
    raw: bytes
    """In the app's own format and words, but for the model's name."""
    asked: bytes
    """What goes upstream: the same bytes where the upstream speaks the app's format."""
    exchange: Exchange | None
    """None: only the engine's own route can answer it."""
    headers: dict[str, str]
    """Those the engine may see."""
    reason: str | None = None
    """Why there is no exchange."""

    @property
    def body(self) -> Json:
        """As it goes upstream, {} where it is not read here."""
        return self.exchange.body if self.exchange is not None else {}

    @property
    def streamed(self) -> bool:
        return self.exchange is not None and self.exchange.streamed

    def can_show(self, result: SiblingResult) -> bool:
        """Whether this sibling's answer can be told in the app's format."""
        if self.exchange is None or result.answer is None:
            return False
        return self.exchange.can_show(result.answer)

    @property
    def is_translated(self) -> bool:
        return self.adapter.path != self.adapter.upstream_path

    @property
    def response_id(self) -> str | None:
        """The name later requests may call the answer by."""
        return getattr(self.exchange, "response_id", None)


@dataclass(frozen=True, slots=True)
class SiblingResult:
    """What became of one sibling: an answer, or the reply or error that was not one."""

    index: int
    reply: Reply | None = None
    answer: Answer | None = None
    error: WireError | None = None

    @property
    def status(self) -> int:
        if self.reply is not None:
            return self.reply.status
        return self.error.status if self.error is not None else 499

    @property
    def shown_message(self) -> Json:
        """What the reward hook sees."""
        assert self.answer is not None
        return self.answer.message | {"finish_reason": self.answer.finish_reason}


@dataclass(frozen=True, slots=True)
class Plan:
    """How many siblings, and what each changes; item 0 changes nothing."""

    num: int
    overrides: Sequence[Json] = field(default_factory=list[dict[str, Any]])

    def bodies(self, request: Request, temperature: float) -> list[bytes]:
        bodies = [request.asked]
        for index in range(1, self.num):
            changed = request.adapter.sibling(request.body, index, temperature)
            override = self.overrides[index] if self.overrides else {}
            bodies.append(orjson.dumps(changed | override))
        return bodies


async def sample(
    upstream: Upstream, request: Request, plan: Plan, temperature: float
) -> list[SiblingResult]:
    """All siblings, in order. A request the engine refuses is refused once: the others are not
    waited for."""
    bodies = plan.bodies(request, temperature)
    tasks = [
        asyncio.create_task(_sibling(upstream, request, SiblingRef(request.id, index), body))
        for index, body in enumerate(bodies)
    ]
    try:
        lead = await tasks[0]
        if 400 <= lead.status < 500:
            return [lead]
        return [lead, *await asyncio.gather(*tasks[1:])]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sibling(
    upstream: Upstream, request: Request, ref: SiblingRef, body: bytes
) -> SiblingResult:
    headers = request.headers | {SIBLING_HEADER: ref.episode_id}
    if ref.index > 0 and _REQUEST_ID in headers:
        # Engines take an id for one request: a second one of that name may be refused.
        headers[_REQUEST_ID] += f"-{ref.index}"
    try:
        reply = await upstream.call(request.adapter.upstream_path, body, headers)
    except WireError as error:
        return SiblingResult(ref.index, error=error)
    return SiblingResult(ref.index, reply, read_answer(request, reply))


def read_answer(request: Request, reply: Reply) -> Answer | None:
    """The completion in a reply, or None where it holds none that its app can read."""
    if reply.status != 200 or reply.streamed != request.streamed:
        return None
    adapter = request.adapter
    try:
        return (
            adapter.read_events(reply.events)
            if reply.streamed
            else adapter.read_json(orjson.loads(reply.body))
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def with_apps_id(reply: Reply, request: Request, index: int) -> Reply:
    """A sibling's reply under the id the app chose, where it chose one."""
    chosen = request.headers.get(_REQUEST_ID) or request.body.get("request_id")
    if index == 0 or not isinstance(chosen, str):
        return reply
    own = re.compile(rb'("id":\s?"[a-z]+-%s)-%d"' % (re.escape(chosen.encode()), index))
    return replace(reply, body=own.sub(rb'\1"', reply.body))
