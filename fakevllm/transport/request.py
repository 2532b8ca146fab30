"""The siblings of one group: their bodies, and what became of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import orjson

from fakevllm.admission.rules import TRAIN, Ruling
from fakevllm.transport.engine_client import EngineClient, EngineResponse
from fakevllm.transport.retry_policy import OUTAGES, outage_error
from fakevllm_adapters.formats.base import Adapter, Answer, Exchange, Json
from fakevllm_adapters.http.client_body import rewrite_body
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.reasons import OutageReason
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER, SiblingRef

_REQUEST_ID = "X-Request-Id"


class SiblingOutcome(StrEnum):
    """What became of a sibling."""

    ANSWERED = "answered"
    HIDDEN = "hidden"
    """An answer that cannot be told in the app's format: it can be trained, not served."""
    REFUSED = "refused"
    """For what is asked, whoever asks."""
    FAILED = "failed"


@dataclass(slots=True)
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
    model: str = ""
    """As the app names it."""
    apps_headers: Mapping[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """All of the app's, names in lower case."""
    ruling: Ruling = TRAIN
    """Set once, before anybody acts on it: all else is never changed."""

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
    reply: EngineResponse | None = None
    answer: Answer | None = None
    error: WireError | None = None

    @property
    def status(self) -> int:
        if self.reply is not None:
            return self.reply.status
        return self.error.status if self.error is not None else 499

    @property
    def outage(self) -> WireError | None:
        """Where the model was not there: what the app is told if it stays away."""
        is_answer = self.reply is not None and self.reply.status not in OUTAGES
        return None if is_answer else self.told

    @property
    def told(self) -> WireError | None:
        """What was said instead of an answer, in the server's own words as far as it has any."""
        reply = self.reply
        if reply is None or reply.status == 200:
            return self.error
        return outage_error(reply.status, reply.body, reply.headers, reply.reason)

    @property
    def is_too_much(self) -> bool:
        """Whether the engine had too much to do for it: another one may well be answered."""
        return self.told is not None and self.told.reason is OutageReason.ENGINE_BUSY

    def answer_id(self, request: Request) -> str | None:
        """What the app that gets it calls it by."""
        name = self.answer.id if self.answer is not None else None
        if request.response_id is not None or name is None:
            return request.response_id
        own = _own_id(request, self.index)
        return name if own is None else re.sub(f"^{own}$", r"\1", name)

    @property
    def shown_message(self) -> Json:
        """What the reward hook sees."""
        assert self.answer is not None
        return self.answer.message | {"finish_reason": self.answer.finish_reason}


@dataclass(frozen=True, slots=True)
class SiblingPlan:
    """How many siblings, and what each changes; item 0 changes nothing."""

    num: int
    overrides: Sequence[Json] = field(default_factory=list[dict[str, Any]])
    is_greedy: bool = False
    """The lead is sampled at temperature 0."""
    seed: int | None = None
    """Of the lead, where its app names none; siblings count up from it."""

    def body(self, request: Request, index: int, temperature: float) -> bytes:
        """Of one sibling, as it goes upstream."""
        seed = self._seed_for(request)
        if index > 0:
            changed = request.adapter.sibling_body(request.body | seed, index, temperature)
            return orjson.dumps(changed | (self.overrides[index] if self.overrides else {}))
        changed = seed | self._temperature_for(request)
        return rewrite_body(request.asked, **changed) if changed else request.asked

    def lead(self, request: Request) -> Request:
        """As its lead goes upstream where it is asked for alone."""
        asked = self.body(request, 0, 0.0)
        return request if asked is request.asked else replace(request, asked=asked)

    def _seed_for(self, request: Request) -> Json:
        is_read = request.exchange is not None
        needs_one = self.seed is not None and is_read and request.body.get("seed") is None
        return {"seed": self.seed} if needs_one else {}

    def _temperature_for(self, request: Request) -> Json:
        own: object = request.body.get("temperature")
        # What the engine would refuse it is to refuse.
        is_good = own is None or (isinstance(own, int | float) and own >= 0)
        return {"temperature": 0} if self.is_greedy and is_good else {}


def sibling_headers(request: Request, index: int) -> dict[str, str]:
    """The app's that an engine may see, and which sibling it is."""
    headers = request.headers | {SIBLING_HEADER: SiblingRef(request.id, index).episode_id}
    if index > 0 and _REQUEST_ID in headers:
        # Engines take an id for one request: a second one of that name may be refused.
        headers[_REQUEST_ID] += f"-{index}"
    return headers


async def sample(
    upstream: EngineClient, request: Request, plan: SiblingPlan, index: int, temperature: float
) -> SiblingResult:
    """One sibling, whatever becomes of it."""
    body = plan.body(request, index, temperature)
    try:
        reply = await upstream.call(
            request.adapter.upstream_path, body, sibling_headers(request, index)
        )
    except WireError as error:
        return SiblingResult(index, error=error)
    return SiblingResult(index, reply, read_answer(request, reply))


def outcome_of(request: Request, result: SiblingResult) -> SiblingOutcome:
    if result.answer is not None:
        return SiblingOutcome.ANSWERED if request.can_show(result) else SiblingOutcome.HIDDEN
    is_refused = 400 <= result.status < 500 and not result.is_too_much
    return SiblingOutcome.REFUSED if is_refused else SiblingOutcome.FAILED


def read_answer(request: Request, reply: EngineResponse) -> Answer | None:
    """The completion in a reply, or None where it holds none that its app can read."""
    if reply.status != 200 or reply.streamed != request.streamed:
        return None
    adapter = request.adapter
    try:
        return (
            adapter.parse_stream(reply.events)
            if reply.streamed
            else adapter.parse_answer(orjson.loads(reply.body))
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def with_apps_id(reply: EngineResponse, request: Request, index: int) -> EngineResponse:
    """A sibling's reply under the id the app chose, where it chose one."""
    own = _own_id(request, index)
    if own is None:
        return reply
    told = re.compile(rb'("id":\s?")%s"' % own.encode())
    return replace(reply, body=told.sub(rb'\1\2"', reply.body))


def _own_id(request: Request, index: int) -> str | None:
    """How a sibling's id looks, the app's one its first group; None where they are the same."""
    chosen = request.headers.get(_REQUEST_ID) or request.body.get("request_id")
    if index == 0 or not isinstance(chosen, str):
        return None
    return f"([a-z]+-{re.escape(chosen)})-{index}"
