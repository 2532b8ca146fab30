"""A group executor with a scripted engine and hook, which a test controls step by step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from fakevllm.admission.admission_rules import Train
from fakevllm.config.serving import ServeRules
from fakevllm.groups.group_context import GroupContext
from fakevllm.groups.group_executor import GroupExecutor, GroupServices
from fakevllm.groups.group_record import GroupDraft
from fakevllm.groups.sampler import Sampler
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.results import Json, RewardOutcome
from fakevllm.hooks.spec import Sibling
from fakevllm.ledger.records import GroupRecord
from fakevllm.sessions.request_placement import Placement
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse, LiveResponse
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm.transport.retry_handler import RetryHandler
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.http.answer_parts import AnswerPart, PartEncoder
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.swarm import (
    SIBLING_HEADER,
    SiblingRange,
    Task,
    parse_sibling,
    parse_siblings,
)

NUM_YIELDS = 30
"""Iterations of the event loop, which are enough for all effects of an event in these tests."""
STREAM = [(b"content-type", b"text/event-stream")]
WHOLE = [(b"content-type", b"application/json")]
PARTS = PartEncoder("boundary")
ALIVE = b": the engine is alive\n\n"
STATUS = {"fails": 500, "is refused": 400, "is too much": 429, "is crowded": 503, "is lost": 503}
ENDS = {"is cut off": "length", "is aborted": "abort"}
"""Finish reasons of whole answers."""
ERROR_MESSAGES = {
    "is crowded": "Too many requests are waiting.",
    "is lost": "The engine did not answer; it is being started again.",
}


def text_of(index: int) -> str:
    return f"answer of {index}"


def chunks_of(index: int) -> list[bytes]:
    deltas: list[tuple[Json, str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": text_of(index)}, None),
        ({}, "stop"),
    ]
    choices = [{"index": 0, "delta": delta, "finish_reason": end} for delta, end in deltas]
    return [encode({"id": f"chatcmpl-{index}", "choices": [choice]}) for choice in choices]


def answer_of(index: int, word: str = "answers") -> bytes:
    message = {"role": "assistant", "content": text_of(index)}
    choice = {"index": 0, "message": message, "finish_reason": ENDS.get(word, "stop")}
    return orjson.dumps({"id": f"chatcmpl-{index}", "choices": [choice]})


def error_of(word: str) -> bytes:
    return orjson.dumps(
        {"error": {"message": ERROR_MESSAGES.get(word, "no"), "code": STATUS[word]}}
    )


class ScriptedEngine(EngineClient):
    """A model server whose siblings wait until the test says how they answer, by `act`.

    If `shares` is False, the server refuses calls that sample several siblings.
    """

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self._shares = shares
        self.calls: list[tuple[int, ...]] = []
        """The indices of the siblings of each call."""
        self.words: dict[int, asyncio.Queue[str]] = {}
        """Queue of instructions for each running sibling."""
        self.started: list[int] = []
        self.ended: list[int] = []
        self.bodies: dict[int, Json] = {}
        self.headers: dict[int, Mapping[str, str]] = {}

    def act(self, index: int, word: str) -> None:
        self.words[index].put_nowait(word)

    @asynccontextmanager
    async def _started(
        self, headers: Mapping[str, str], body: bytes
    ) -> AsyncGenerator[tuple[int, asyncio.Queue[str]]]:
        index = parse_sibling(headers[SIBLING_HEADER]).index
        self.calls.append((index,))
        self.started.append(index)
        self.bodies[index] = orjson.loads(body)
        self.words[index] = asyncio.Queue()
        try:
            yield index, self.words[index]
        finally:
            del self.words[index]
            self.ended.append(index)

    async def call(self, path: str, body: bytes, headers: Mapping[str, str]) -> EngineResponse:
        async with self._started(headers, body) as (index, words):
            word = await words.get()
        if word == "breaks":
            raise unavailable("The engine is gone.", OutageReason.ENGINE_FAILED)
        if word in STATUS:
            return EngineResponse(STATUS[word], WHOLE, error_of(word), False, 0.0)
        if orjson.loads(body).get("stream"):
            return EngineResponse(200, STREAM, b"".join([*chunks_of(index), DONE]), True, 0.0)
        return EngineResponse(200, WHOLE, answer_of(index, word), False, 0.0)

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        siblings = parse_siblings(headers[SIBLING_HEADER])
        if siblings.num > 1:
            if not self._shares:
                yield LiveResponse(400, WHOLE, False, _once(error_of("is refused")))
                return
            self.headers |= {ref.index: headers for ref in siblings.siblings}
            async with self._shared(siblings, body) as response:
                yield response
            return
        async with self._started(headers, body) as (index, words):
            word = await words.get()
            if word == "breaks":
                raise unavailable("The engine is gone.", OutageReason.ENGINE_FAILED)
            if word in STATUS:
                yield LiveResponse(STATUS[word], WHOLE, False, _once(error_of(word)))
            elif not orjson.loads(body).get("stream"):
                yield LiveResponse(200, WHOLE, False, _once(answer_of(index)))
            else:
                yield LiveResponse(200, STREAM, True, self._drip(index, words, word))

    @asynccontextmanager
    async def _shared(self, siblings: SiblingRange, body: bytes) -> AsyncGenerator[LiveResponse]:
        """Answer a call that samples several siblings. The first error ends the whole call."""
        indices = [sibling.index for sibling in siblings.siblings]
        self.calls.append(tuple(indices))
        self.started += indices
        parsed: Json = orjson.loads(body)
        self.bodies |= {index: parsed for index in indices}
        acts: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.words |= {index: _Acts(acts, index) for index in indices}
        try:
            index, word = await acts.get()
            if word == "breaks":
                raise unavailable("The engine is gone.", OutageReason.ENGINE_FAILED)
            if word in STATUS:
                yield LiveResponse(STATUS[word], WHOLE, False, _once(error_of(word)))
            else:
                acts.put_nowait((index, word))
                yield LiveResponse(200, PARTS.headers, False, self._parts(acts, body))
        finally:
            for index in indices:
                if self.words.pop(index, None) is not None:
                    self.ended.append(index)

    async def _parts(
        self, acts: asyncio.Queue[tuple[int, str]], body: bytes
    ) -> AsyncIterator[bytes]:
        is_streamed = bool(orjson.loads(body).get("stream"))
        while True:
            index, word = await acts.get()
            if word == "is cut":  # the server ends the response
                yield PARTS.end()
                return
            if word in STATUS or word == "breaks":
                raise unavailable("The engine is gone in the middle.", OutageReason.ENGINE_FAILED)
            if word == "drops":
                raise unavailable("The connection is gone.", OutageReason.SERVER_BROKE_OFF)
            if word == "garbles":
                yield b"no part\r\n\r\n"
                continue
            if is_streamed:
                part = AnswerPart(index, STREAM, b"".join([*chunks_of(index), DONE]))
            else:
                part = AnswerPart(index, WHOLE, answer_of(index, word))
            if self.words.pop(index, None) is not None:
                self.ended.append(index)
                yield PARTS.part(part)

    async def _drip(self, index: int, words: asyncio.Queue[str], word: str) -> AsyncIterator[bytes]:
        role, token, *rest = chunks_of(index)
        yield ALIVE
        yield role
        if word == "tells its role":
            word = await words.get()
        yield token
        if word == "begins":
            word = await words.get()
        if word != "answers":
            raise unavailable("The engine is gone in the middle.", OutageReason.ENGINE_FAILED)
        for chunk in [*rest, DONE]:
            yield chunk


class _Acts(asyncio.Queue[str]):
    """The instructions for one sibling of a shared call."""

    def __init__(self, acts: asyncio.Queue[tuple[int, str]], index: int) -> None:
        super().__init__()
        self._acts = acts
        self._index = index

    def put_nowait(self, item: str) -> None:
        self._acts.put_nowait((self._index, item))


async def _once(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk


class ScriptedHook(HookWorker):
    """A hook whose scoring waits until the test passes rewards."""

    def __init__(self) -> None:
        self.waiting: asyncio.Future[list[float | None] | None] | None = None
        self.scored: list[list[int]] = []

    async def reward(
        self, siblings: list[Sibling], answers: list[Json], question: str
    ) -> RewardOutcome:
        assert self.waiting is None, "one scoring at a time"
        self.scored.append([sibling.index for sibling in siblings])
        self.waiting = asyncio.get_running_loop().create_future()
        try:
            rewards = await self.waiting
        finally:
            self.waiting = None
        reason = None if rewards is not None else "hook_raised: no"
        return RewardOutcome(rewards, reason, [{} for _ in answers], "hash")


@dataclass
class Stage:
    """A running request, with the engine, the hook and the connection that the test controls."""

    upstream: ScriptedEngine
    hook: ScriptedHook
    sibling_limit: SiblingLimit
    run: GroupExecutor
    handler: asyncio.Task[None]
    sent: list[MutableMapping[str, Any]]
    has_left: asyncio.Event
    records: list[GroupRecord] = field(default_factory=list[GroupRecord])

    async def turn(self) -> None:
        for _ in range(NUM_YIELDS):
            await asyncio.sleep(0)

    async def act(self, index: int, word: str) -> None:
        self.upstream.act(index, word)
        await self.turn()

    async def score(self, *rewards: float | None, fails: bool = False) -> None:
        assert self.hook.waiting is not None
        self.hook.waiting.set_result(None if fails else [*rewards])
        await self.turn()

    async def leave(self) -> None:
        self.has_left.set()
        await self.turn()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_answered(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)

    @property
    def record(self) -> GroupRecord:
        (record,) = self.records
        return record


class Caller:
    """The connection of the app."""

    def __init__(self) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.has_left = asyncio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    async def receive(self) -> MutableMapping[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


def make_request(streamed: bool, headers: Mapping[str, str], shadow: bool) -> Request:
    adapter = ADAPTERS["chat"]
    body: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    body |= {"stream": streamed}
    raw = orjson.dumps(body)
    exchange = adapter.open(body, EngineInfo())
    return Request("r1", adapter, raw, raw, exchange, dict(headers), ruling=Train(shadow=shadow))


@asynccontextmanager
async def staged(
    num: int,
    *,
    streamed: bool = False,
    bound: int = 0,
    headers: Mapping[str, str] | None = None,
    placement: Placement | None = None,
    shadow: bool = False,
    hold_s: float = 30.0,
    failure_floor: float | None = None,
    link: SwarmLink | None = None,
    shares: bool = False,
    **rules: Any,
) -> AsyncGenerator[Stage]:
    """Start a request with `num` siblings. At the end, stop all work that is still running."""
    request = make_request(streamed, headers or {}, shadow)
    upstream, hook, sibling_limit, caller = (
        ScriptedEngine(shares=shares),
        ScriptedHook(),
        SiblingLimit(bound),
        Caller(),
    )
    records: list[GroupRecord] = []
    services = GroupServices(
        sampler=Sampler(
            upstream, RetryHandler(upstream, link, hold_s, sibling_limit=sibling_limit), 1.0
        ),
        hooks=HookVersions(hook),
        sibling_limit=sibling_limit,
        rng=random.Random(0),
        on_end=lambda _, record: records.append(record),
        failure_floor=failure_floor,
    )
    sibling_limit.acquire(num - 1)
    policy = ServeRules(**rules)
    app = AppResponse(caller.send, request.adapter, request.exchange)
    draft = GroupDraft(request, Task(), "", None, placement=placement, app=app)
    plan = SiblingPlan(num, is_greedy=policy.policy == "greedy")
    context = GroupContext(draft, policy, app, app.watching(caller.receive), plan)
    run = GroupExecutor(services, context)

    async def handle() -> None:
        async with app:
            await run.answer_app()

    handler = asyncio.create_task(handle())
    stage = Stage(
        upstream, hook, sibling_limit, run, handler, caller.sent, caller.has_left, records
    )
    await stage.turn()
    try:
        yield stage
    finally:
        run.stop()
        await run.wait_closed()
        await handler
        await upstream.close()
