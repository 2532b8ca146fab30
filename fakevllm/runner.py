"""The life of one passive request: plan, sample, score, answer, settle. The async shell around the
pure parts."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp

from fakevllm.config import Config
from fakevllm.fanout import Verdict, decide
from fakevllm.group import GroupDraft
from fakevllm.hooks.outcomes import HookFailure, RewardOutcome
from fakevllm.hooks.spec import Sibling
from fakevllm.hooks.worker import HookWorker
from fakevllm.ledger.store import Ledger
from fakevllm.policy import why_only_served
from fakevllm.reply import AppReply
from fakevllm.siblings import Plan, Request, SiblingResult, sample
from fakevllm.swarm.link import SwarmLink
from fakevllm.upstream import Reply, Upstream, unreachable
from fakevllm_adapters.asgi import (
    Receive,
    Send,
    send_bytes,
    send_chunk,
    start_stream,
    until_disconnect,
)
from fakevllm_adapters.errors import WireError, internal_error
from fakevllm_adapters.sse import DONE, encode
from fakevllm_adapters.swarm import EndGroupRequest, Task

log = logging.getLogger("fakevllm.runner")

CLOSE_GRACE_S = 10.0
"""For groups that are being settled when the proxy stops."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sampled group with what the hook made of it."""

    results: list[SiblingResult]
    rewards: dict[int, float | None]
    annotations: dict[int, dict[str, Any]]
    reason: str | None
    """Why there are no rewards."""
    hook_hash: str | None
    verdict: Verdict


class Runner:
    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        hooks: HookWorker | None,
        ledger: Ledger,
        link: SwarmLink,
    ) -> None:
        self._temperature = config.job.temperature
        self._num_siblings = config.job.num_repeat
        self._upstream = upstream
        self._hooks = hooks
        self._ledger = ledger
        self._link = link
        self._chance = random.Random(config.job.seed)
        self._settling: set[asyncio.Task[None]] = set()

    async def handle(
        self, request: Request, draft: GroupDraft, receive: Receive, send: Send
    ) -> None:
        """Answers the app, whatever happens behind it."""
        plan, reason = await self._plan(request, draft.task)
        draft.num_siblings = plan.num
        left = asyncio.ensure_future(until_disconnect(receive))
        try:
            if reason is not None:
                await self._serve_once(request, draft, reason, left, send)
            else:
                await self._serve_best(request, draft, plan, left, send)
        finally:
            left.cancel()

    async def close(self) -> None:
        if self._settling:
            await asyncio.wait(self._settling, timeout=CLOSE_GRACE_S)

    async def _plan(self, request: Request, task: Task) -> tuple[Plan, str | None]:
        """How the request is sampled, and why it is only served if it is."""
        if self._hooks is None:
            return Plan(1), why_only_served(request.body, 1)
        plan = Plan(self._num_siblings)
        if self._hooks.info.has_submit:
            asked = await self._hooks.submit(request.id, task)
            if isinstance(asked, HookFailure):
                return Plan(1), asked.reason
            if asked.overrides is not None:
                plan = Plan(len(asked.overrides), asked.overrides)
            elif asked.num is not None:
                plan = Plan(asked.num)
        reason = why_only_served(request.body, plan.num)
        return (plan, None) if reason is None else (Plan(1), reason)

    # --- one sibling: relayed as it comes

    async def _serve_once(
        self,
        request: Request,
        draft: GroupDraft,
        reason: str,
        left: asyncio.Future[None],
        send: Send,
    ) -> None:
        work = asyncio.create_task(self._relay(request, send))
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return self._ledger.record(draft.failed("client_disconnected", 499))
        try:
            result = await work
        except WireError as error:
            await AppReply(send, streamed=False).refuse(error)
            return self._ledger.record(draft.failed("upstream_unreachable", error.status))
        self._ledger.record(draft.served_once(result, reason))

    async def _relay(self, request: Request, send: Send) -> Reply:
        """The upstream's bytes, sent on as they come. Raises WireError while nothing has been
        sent."""
        started = time.monotonic()
        path = request.adapter.path
        taken: list[bytes] = []
        opened = False
        try:
            async with self._upstream.live("POST", path, request.raw, request.headers) as live:
                if not live.streamed:
                    body = b"".join([chunk async for chunk in live.chunks])
                    opened = True
                    await send_bytes(send, live.status, body, live.headers)
                    return Reply(live.status, live.headers, body, False, time.monotonic() - started)
                await start_stream(send, live.status, live.headers)
                opened = True
                async for chunk in live.chunks:
                    taken.append(chunk)
                    await send_chunk(send, chunk)
                if not b"".join(taken[-2:]).endswith(DONE):
                    raise unreachable(EOFError("the stream broke off"))
                await send_chunk(send, b"", last=True)
        except WireError as error:
            if not opened:
                raise
            taken.append(encode(error.body) + DONE)
            await send_chunk(send, taken[-1], last=True)
        return Reply(200, [], b"".join(taken), True, time.monotonic() - started)

    # --- several siblings: the best is returned

    async def _serve_best(
        self,
        request: Request,
        draft: GroupDraft,
        plan: Plan,
        left: asyncio.Future[None],
        send: Send,
    ) -> None:
        app = AppReply(send, streamed=request.streamed)
        work = asyncio.create_task(self._sample_and_score(request, draft.task, plan))
        waiting = asyncio.create_task(app.wait_for(work))
        await asyncio.wait({waiting, left}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            for task in (waiting, work):
                task.cancel()
            await asyncio.gather(waiting, work, return_exceptions=True)
            return self._later(self._abandon(draft.failed("client_disconnected", 499)))
        try:
            scored = await waiting
        except Exception:  # isolates: a defect of ours must not leave the app without an answer
            log.exception("request %s failed", request.id)
            await app.refuse(internal_error())
            return self._later(self._abandon(draft.failed("internal_error", 500)))
        await self._answer(app, scored)
        self._later(self._settle(request, draft, scored))

    async def _sample_and_score(self, request: Request, task: Task, plan: Plan) -> Scored:
        results = await sample(self._upstream, request, plan, self._temperature)
        answered = [result for result in results if result.answer is not None]
        outcome = await self._score(request, task, answered)
        scores = outcome.rewards or [None] * len(answered)
        rewards = {result.index: reward for result, reward in zip(answered, scores, strict=True)}
        notes = {
            result.index: note for result, note in zip(answered, outcome.annotations, strict=False)
        }
        verdict = decide([result.index for result in answered], rewards, self._chance)
        return Scored(results, rewards, notes, outcome.reason, outcome.hook_hash or None, verdict)

    async def _score(
        self, request: Request, task: Task, answered: list[SiblingResult]
    ) -> RewardOutcome:
        assert self._hooks is not None
        if len(answered) < 2:
            return RewardOutcome(None, "no_group" if answered else "no_answer", [])
        siblings = [
            Sibling(
                result.index,
                task,
                f"{request.id}/{result.index}",
                result.answer.finish_reason,
                result.answer.usage,
            )
            for result in answered
            if result.answer is not None
        ]
        answers = [result.shown_message for result in answered]
        return await self._hooks.reward(siblings, answers, request.adapter.question(request.body))

    async def _answer(self, app: AppReply, scored: Scored) -> None:
        """The served sibling's own bytes; where none answered, the lead's trouble."""
        index = scored.verdict.served
        shown = scored.results[index if index is not None else 0]
        if shown.reply is not None:
            return await app.answer(shown.reply)
        assert shown.error is not None
        await app.refuse(shown.error)

    async def _settle(self, request: Request, draft: GroupDraft, scored: Scored) -> None:
        """In the ledger first, then at the server; what the server says goes into the ledger."""
        record = draft.scored(scored)
        if record.state != "scored":
            return await self._abandon(record)
        self._ledger.record(record)
        await self._ledger.flush()  # a group the server trains on must be found here, come what may
        rewards = [scored.rewards.get(index) for index in range(len(scored.results))]
        end = EndGroupRequest(
            group_id=request.id,
            task_id=draft.task.task_id,
            rewards=rewards,
            metadata={"question": request.adapter.question(request.body)},
        )
        try:
            reply = await self._link.end_group(end)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("group %s could not be ended: %r", request.id, error)
            return self._ledger.settle(request.id, "lost", "swarm_unreachable", None, [])
        if not reply.success:
            return self._ledger.settle(
                request.id, "lost", reply.failure_reason, reply.step, reply.calls
            )
        state = "pooled" if reply.pooled else "dropped"
        self._ledger.settle(
            request.id, state, reply.failure_reason or None, reply.step, reply.calls
        )

    async def _abandon(self, record: Any) -> None:
        self._ledger.record(record)
        await self._link.abort_group(record.group_id)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a group could not be settled", exc_info=task.exception())
