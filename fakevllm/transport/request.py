"""One request of an app, the plan for the request's siblings, and the result of each sibling. The
plan says how many siblings (answers) are sampled, and how the calls that sample them differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import orjson

from fakevllm.admission.admission_rules import TRAIN, Ruling
from fakevllm.tracing.request_trace import RequestTrace, sampling_fields
from fakevllm.transport.engine_client import EngineClient, EngineResponse
from fakevllm.transport.request_arm import RequestArm, check_policy, with_policy
from fakevllm.transport.retry_policy import OUTAGES, outage_error
from fakevllm_adapters.formats.base import Adapter, Answer, Exchange, Json
from fakevllm_adapters.http.client_body import rewrite_body
from fakevllm_adapters.http.receipt_headers import VERSION_HEADER
from fakevllm_adapters.privacy.store_header import STORE_NONE
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.swarm import (
    ARM_HEADER,
    SESSION_HEADER,
    SIBLING_HEADER,
    SiblingRange,
)

_REQUEST_ID = "X-Request-Id"
_MAX_SHARED_SEED = 2**62
"""Maximum seed of a lead whose siblings may share a call. For each further choice of a call, the
engine adds 1 to the seed, and the sum must not become too large for the engine."""
_UNSHARED_OVERRIDES = frozenset({"seed", "n", "request_id", "stream", "stream_options"})
"""Body fields that would have another effect in a shared call. If a plan replaces one of these
fields for a sibling, the sibling is sampled by a call of its own."""


class SiblingOutcome(StrEnum):
    """How the sampling of one sibling (one answer to a request) has ended."""

    ANSWERED = "answered"
    """The answer can be served and trained."""
    HIDDEN = "hidden"
    """The answer can be trained but not served, because the app's format cannot express it."""
    REFUSED = "refused"
    """The engine refused the content of the request, so it would refuse every sibling."""
    FAILED = "failed"
    """There is no answer, for a reason other than the content of the request."""


@dataclass(slots=True)
class Request:
    """One decoded request of an app, with the proxy's decisions about the request."""

    id: str
    adapter: Adapter
    raw: bytes
    """Body in the app's own format. Only the model's name may have been changed."""
    upstream_body: bytes
    """Body that is sent to the engine. If the route of the upstream server has the app's format,
    this body equals `raw`."""
    exchange: Exchange | None
    """The parsed request, or None if the proxy cannot parse or translate the request. If it is
    None, only the engine's own route for the app's format can answer the request."""
    headers: dict[str, str]
    """The app's headers that may be sent to the engine."""
    no_exchange_reason: str | None = None
    """Reason why `exchange` is None; None if `exchange` is set."""
    model: str = ""
    """Model name as the app sent it."""
    alias: str | None = None
    """Alias by which the app requested the served model, and which the answer must contain as the
    model's name. None if the app sent no alias."""
    app_headers: Mapping[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """All headers of the app, with names in lower case."""
    has_native_route: bool = True
    """Whether the request may be sent to the engine's own route for the app's format. False if the
    request continues a response that the proxy's ledger has. The engine may have a response of
    another app with the same id, and would continue that response."""
    ruling: Ruling = TRAIN
    """Admission decision: whether the request gets siblings and is trained. The decision is set
    once, before it is first read. After the request was created, the proxy sets only this field,
    `arm`, `session`, `is_redacted` and `trace`. The code that sets `arm` may also replace
    `exchange`."""
    arm: RequestArm | None = None
    """Arm of the request's session, which decides which weights answer. None if sessions are not
    assigned to arms. The arm is set once, before the first call."""
    session: str | None = None
    """Id of the request's session, which is set once, before the first call. None if the request
    has no place in a session, or if the place is not known before the answer."""
    is_redacted: bool = False
    """Whether the request has text that is redacted. The server captures no calls of it."""
    is_stored: bool = True
    """Whether the request may be stored. If False, proxy and server write nothing of it."""
    trace: RequestTrace | None = None
    """Notes for the request's OpenTelemetry spans; None if no spans are made of it."""

    @property
    def body(self) -> Json:
        """The parsed body in the upstream server's format. It is {} if the request could not be
        parsed or translated."""
        return self.exchange.body if self.exchange is not None else {}

    @property
    def streamed(self) -> bool:
        return self.exchange is not None and self.exchange.streamed

    @property
    def is_captured(self) -> bool:
        """True if the server records this request's calls, so that the sampled siblings can be
        trained. Calls of redacted requests, and of requests that may not be stored, are not
        recorded. If sessions are assigned to arms, only calls of the training arm are recorded. An
        arm is a set of sessions that one version of the weights answers."""
        if self.is_redacted or not self.is_stored:
            return False
        return self.arm is None or self.arm.is_training

    @property
    def call_headers(self) -> dict[str, str]:
        """The headers that all engine calls for this request share. The header that names the
        sampled siblings is not among them. Without this header, the server does not record the call
        for training."""
        headers = self.headers if self.is_stored else self.headers | STORE_NONE
        if self.session is not None:
            headers = headers | {SESSION_HEADER: self.session}
        return headers if self.arm is None else headers | {ARM_HEADER: self.arm.answering.value}

    @property
    def policy_fields(self) -> Json:
        """Fields of the request body that tell the engine which weights answer this request. These
        fields are added to the body of an engine call. {} selects the served weights."""
        if self.arm is None or self.arm.policy is None:
            return {}
        return {"model": self.arm.policy}

    def can_show(self, result: SiblingResult) -> bool:
        """Return True if the app's format can express this sibling's answer."""
        if self.exchange is None or result.answer is None:
            return False
        return self.exchange.can_show(result.answer)

    @property
    def is_translated(self) -> bool:
        """True if the request must be translated, because the route of the upstream server has
        another format than the app's request."""
        return self.adapter.path != self.adapter.upstream_path

    @property
    def response_id(self) -> str | None:
        """Answer id that the proxy has chosen. Later requests can refer to the answer by this id.
        None if the proxy chooses no ids for answers of this format."""
        return getattr(self.exchange, "response_id", None)


@dataclass(frozen=True, slots=True)
class SiblingResult:
    """Result of one sibling (one sampling of a request): an answer, or an error in its place."""

    index: int
    reply: EngineResponse | None = None
    answer: Answer | None = None
    error: WireError | None = None

    @property
    def status(self) -> int:
        """HTTP status of the reply or of the error. The status is 499 if the sibling has
        neither."""
        if self.reply is not None:
            return self.reply.status
        return self.error.status if self.error is not None else 499

    @property
    def outage(self) -> WireError | None:
        """The error that the app gets if the engine was unavailable for this sibling. None if the
        engine was available."""
        is_answer = self.reply is not None and self.reply.status not in OUTAGES
        return None if is_answer else self.upstream_error

    @property
    def upstream_error(self) -> WireError | None:
        """The error that was received instead of an answer, with the server's message if the server
        sent one. None if there is no error."""
        reply = self.reply
        if reply is None or reply.status == 200:
            return self.error
        return outage_error(reply.status, reply.body, reply.headers, reply.reason)

    @property
    def is_busy(self) -> bool:
        """Whether the engine refused this sibling because of overload. The engine may still answer
        other siblings."""
        error = self.upstream_error
        return error is not None and error.reason is OutageReason.ENGINE_BUSY

    def answer_id(self, request: Request) -> str | None:
        """Return the id that the app sees for this answer. Return None if the answer has no id."""
        engine_id = self.answer.id if self.answer is not None else None
        if request.response_id is not None or engine_id is None:
            return request.response_id
        pattern = _sibling_id_pattern(request, self.index)
        return engine_id if pattern is None else re.sub(f"^{pattern}$", r"\1", engine_id)

    @property
    def shown_message(self) -> Json:
        """The answer's message in the form that the reward hook gets, including its
        `finish_reason`."""
        assert self.answer is not None
        return self.answer.message | {"finish_reason": self.answer.finish_reason}


@dataclass(frozen=True, slots=True)
class SiblingPlan:
    """The number of siblings of a request, and the fields of the request body that are changed for
    each sibling."""

    num: int
    overrides: Sequence[Json] = field(default_factory=list[dict[str, Any]])
    """For each sibling, an object with the fields that replace fields of the body. The lead's
    object, at index 0, is empty. An empty list means that no field is replaced."""
    is_greedy: bool = False
    """Whether the lead is sampled at temperature 0."""
    seed: int | None = None
    """Seed of the lead, used if the app's request has no seed. Each other sibling gets this seed
    plus its index."""

    def body(self, request: Request, index: int, temperature: float) -> bytes:
        """Return the body of the call that samples sibling `index`.

        `temperature` is the sampling temperature of all siblings except the lead (sibling 0).

        The lead has the app's temperature, or 0 if `is_greedy` is set.
        """
        seed = self._seed_for(request)
        if index > 0:
            return orjson.dumps(self._sibling_body(request, index, temperature))
        changed = seed | self._temperature_for(request) | request.policy_fields
        body = request.upstream_body
        return rewrite_body(body, **changed) if changed else body

    def call_fields(self, request: Request, index: int, temperature: float) -> Json:
        """Return the fields of the body that `body` returns for a parsed request."""
        if index > 0:
            return self._sibling_body(request, index, temperature)
        changed = self._seed_for(request) | self._temperature_for(request) | request.policy_fields
        return request.body | changed

    def shared_body(self, request: Request, indices: Sequence[int], temperature: float) -> bytes:
        """Return the body of the call that samples the siblings `indices`. If the request has a
        seed, the call has the seed of its first sibling, and the engine adds i to this seed for
        choice i. Each sibling therefore has the same seed as in a call of its own."""
        body = self._sibling_body(request, indices[0], temperature)
        return orjson.dumps(body | {"n": len(indices)})

    def calls(
        self, request: Request, indices: Sequence[int], temperature: float, max_per_call: int
    ) -> list[tuple[int, ...]]:
        """Divide the siblings (answers to sample) with these `indices` into engine calls. Each
        element of the result contains the indices of the siblings that one call samples, at most
        `max_per_call`. The lead (sibling 0) has a call of its own. Consecutive other siblings share
        a call if their bodies are equal and allow a shared call."""
        calls: list[tuple[int, ...]] = []
        for index in indices:
            last = calls[-1] if calls else (0,)
            can_join = last[0] > 0 and index == last[-1] + 1 and len(last) < max_per_call
            if can_join and self._may_share(request, last[0], index, temperature):
                calls[-1] = (*last, index)
            else:
                calls.append((index,))
        return calls

    def _may_share(self, request: Request, first: int, index: int, temperature: float) -> bool:
        """Return True if one call can sample the siblings `first` and `index` together, as two of
        its choices."""
        own = self.overrides[index] if self.overrides else {}
        if own != (self.overrides[first] if self.overrides else {}):
            return False
        seed = self.lead_seed(request)
        return can_share_call(request.body | {"temperature": temperature} | own, seed, own)

    def _sibling_body(self, request: Request, index: int, temperature: float) -> Json:
        body = request.body | self._seed_for(request)
        changed = request.adapter.sibling_body(body, index, temperature)
        overrides = self.overrides[index] if self.overrides else {}
        return changed | overrides | request.policy_fields

    def lead_seed(self, request: Request) -> int | None:
        """Return the sampling seed of the lead (sibling 0, the app's own request). Return None if
        the lead has no seed."""
        return request.adapter.seed(request.body | self._seed_for(request))

    def lead_request(self, request: Request) -> Request:
        """Return the request with the body that this plan gives to the lead (sibling 0). Use the
        returned request if only the lead is sampled."""
        body = self.body(request, 0, 0.0)
        is_same = body is request.upstream_body
        return request if is_same else replace(request, upstream_body=body)

    def _seed_for(self, request: Request) -> Json:
        is_parsed = request.exchange is not None
        needs_seed = self.seed is not None and is_parsed and request.body.get("seed") is None
        return {"seed": self.seed} if needs_seed else {}

    def _temperature_for(self, request: Request) -> Json:
        temperature: object = request.body.get("temperature")
        # An invalid temperature is kept, so that the engine refuses the request.
        is_valid = temperature is None or (
            isinstance(temperature, int | float) and temperature >= 0
        )
        return {"temperature": 0} if self.is_greedy and is_valid else {}


def can_share_call(body: Json, seed: int | None, overrides: Json) -> bool:
    """Return True if one call with the field `n` can sample several siblings with this body. This
    is possible only if each sibling's answer is the same as if the sibling had a call of its own.

    `seed` is the lead's seed. `overrides` are the fields of the app's body that are replaced for
    these siblings.
    """
    temperature: object = body.get("temperature")
    stream: object = body.get("stream")
    return (
        (stream is None or isinstance(stream, bool))  # vLLM reads 1 and "yes" as true
        and (stream is True or not _differs_in_a_stream(body))
        and isinstance(temperature, int | float)
        and temperature > 0  # vLLM refuses several greedy choices
        and (seed is None or 0 <= seed <= _MAX_SHARED_SEED)
        and _UNSHARED_OVERRIDES.isdisjoint(overrides)
    )


def _differs_in_a_stream(body: Json) -> bool:
    """Return True if vLLM may answer this body differently with and without a stream. The siblings
    of an app that wants a whole answer then cannot share a call, because shared calls are always
    streamed.

    There are three differences. vLLM's parsers read some tool calls differently in a stream.
    Without a generation prompt, a whole answer has the role of the last message, and a stream has
    the role `assistant`. If tokens are returned as ids, the text offsets of a streamed completion
    differ from those of a whole completion.
    """
    return (
        (bool(body.get("tools")) and body.get("tool_choice") != "none")
        or body.get("add_generation_prompt", True) is not True
        or bool(body.get("return_tokens_as_token_ids"))
    )


def sibling_headers(request: Request, index: int, num: int = 1) -> dict[str, str]:
    """Return the headers of the call that samples `num` siblings, beginning with sibling `index`.
    If the server records the request's calls for training, the headers name the request and these
    siblings."""
    headers = dict(request.call_headers)
    if request.is_captured:
        headers[SIBLING_HEADER] = SiblingRange(request.id, index, num).header
    if index > 0 and _REQUEST_ID in headers:
        # Request ids must be unique at the engine: it may refuse a second request with the same id.
        headers[_REQUEST_ID] += f"-{index}"
    return headers


def begin_traced_call(
    request: Request, plan: SiblingPlan, indices: Sequence[int], temperature: float
) -> None:
    """Note for the request's spans that a call begins which samples the siblings `indices`. Do
    nothing if the request has no trace."""
    if request.trace is None:
        return
    for index in indices:
        sampling = sampling_fields(plan.call_fields(request, index, temperature))
        request.trace.begin_call(index, sampling, len(indices))


def end_traced_call(request: Request, result: SiblingResult) -> None:
    """Note for the request's spans that a sibling's call has ended. Do nothing if the request has
    no trace."""
    if request.trace is None:
        return
    headers = {} if result.reply is None else dict(result.reply.headers)
    version = headers.get(VERSION_HEADER)
    request.trace.end_call(
        result.index,
        result.status,
        result.answer,
        None if version is None else version.decode("latin-1"),
    )


async def sample(
    upstream: EngineClient, request: Request, plan: SiblingPlan, index: int, temperature: float
) -> SiblingResult:
    """Send one sibling to the engine and return its result. If the engine answers with an error,
    the result contains the error, and nothing is raised."""

    async def call() -> EngineResponse:
        body = plan.body(request, index, temperature)
        headers = sibling_headers(request, index)
        reply = await upstream.call(request.adapter.upstream_path, body, headers)
        check_policy(request.arm, reply.status)
        return reply

    try:
        reply = await with_policy(request.arm, call)
    except WireError as error:
        return SiblingResult(index, error=error)
    return SiblingResult(index, reply, read_answer(request, reply))


def outcome_of(request: Request, result: SiblingResult) -> SiblingOutcome:
    """Return how the sampling of a sibling (one answer to a request) has ended."""
    if result.answer is not None:
        return SiblingOutcome.ANSWERED if request.can_show(result) else SiblingOutcome.HIDDEN
    is_refused = 400 <= result.status < 500 and not result.is_busy
    return SiblingOutcome.REFUSED if is_refused else SiblingOutcome.FAILED


def read_answer(request: Request, reply: EngineResponse) -> Answer | None:
    """Return the parsed answer in a reply.

    Return None if the reply is an error or cannot be parsed. Also return None if the reply is
    streamed although the app asked for no stream, or the other way round.
    """
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


def with_app_id(reply: EngineResponse, request: Request, index: int) -> EngineResponse:
    """Return a sibling's reply with the answer id that the app expects.

    An engine makes the id of an answer from the id of the request. If the app chose a request id,
    the proxy appends each sibling's index to the request id, because request ids must be unique at
    the engine. This function removes the index from the answer's id. If the app chose no request
    id, the reply is returned unchanged.
    """
    pattern = _sibling_id_pattern(request, index)
    if pattern is None:
        return reply
    id_field = re.compile(rb'("id":\s?")%s"' % pattern.encode())
    return replace(reply, body=id_field.sub(rb'\1\2"', reply.body))


def _sibling_id_pattern(request: Request, index: int) -> str | None:
    """Return a regular expression that matches the id in this sibling's answer. Its first capture
    group is the id that the app expects, without the sibling's index.

    Return None for the lead (sibling 0), whose id has no index. Also return None if the app chose
    no id for its request.
    """
    chosen = request.headers.get(_REQUEST_ID) or request.body.get("request_id")
    if index == 0 or not isinstance(chosen, str):
        return None
    # A call that samples several siblings has the id of the first one.
    return rf"([a-z]+-{re.escape(chosen)})-\d+"
