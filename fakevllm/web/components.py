"""The proxy's parts, made together and closed in reverse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fakevllm.admission.kill_switch import Pause, pause_file
from fakevllm.admission.task_index import TaskIndex, read_tasks
from fakevllm.config.model import Config, DatasetSection
from fakevllm.groups.lockstep import Lockstep
from fakevllm.groups.pipeline import Pipeline
from fakevllm.groups.resend_cache import ResendCache
from fakevllm.groups.traffic_gate import TrafficGate
from fakevllm.hooks.worker import HookWorker
from fakevllm.ledger.lock import LedgerLock
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.sessions.index import NUM_RESTORED
from fakevllm.sessions.tree import Conversations
from fakevllm.settlement.delivery import Delivery
from fakevllm.settlement.feedback_service import FeedbackService
from fakevllm.settlement.late_samples import LateSamples
from fakevllm.swarm.link import SwarmLink
from fakevllm.swarm.load_probe import EngineQueue
from fakevllm.transport.engine_client import Upstream
from fakevllm.transport.fallback import Fallback
from fakevllm.transport.retry import Lifeline
from fakevllm.transport.sibling_limit import Room
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.reasons import OutageReason
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class ProxyComponents:
    config: Config
    ledger: Ledger
    upstream: Upstream
    link: SwarmLink
    tasks: TaskIndex
    runner: Pipeline
    conversations: Conversations
    traffic: TrafficGate
    resends: ResendCache
    settling: Delivery
    feedback: FeedbackService

    def rename(self, body: dict[str, Any]) -> bool:
        """Puts the served model's name for an alias. Returns whether the body changed. Raises
        WireError (503) while that name is not known."""
        asked, served = body.get("model"), self.link.model
        if not isinstance(asked, str) or asked == served or not self._is_alias(asked):
            return False
        if served is None:
            raise _model_unknown()
        body["model"] = served
        return True

    def served_name(self, asked: str) -> str | None:
        """What to ask for instead of an alias; None where it is none, or that is not known yet."""
        served = self.link.model
        return served if asked != served and self._is_alias(asked) else None

    def _is_alias(self, name: str) -> bool:
        return is_alias(name, self.config.models.aliases)

    @property
    def num_siblings(self) -> int:
        """Bodies that are sampled of one request, as configured."""
        return self.config.most_siblings

    @property
    def metrics(self) -> Metrics:
        return self.runner.metrics


def _model_unknown() -> WireError:
    message = "The engine is not ready: the swarm server has not reported which model it serves."
    return unavailable(message, OutageReason.ENGINE_NOT_READY)


def is_alias(name: str, aliases: Sequence[str]) -> bool:
    return name in aliases or ("*" in aliases and name != "")


@contextlib.asynccontextmanager
async def open_proxy(config: Config) -> AsyncGenerator[ProxyComponents]:
    """Raises UserError for what the user can mend."""
    async with contextlib.AsyncExitStack() as stack:
        rows = _rows(config.dataset)
        stack.callback(LedgerLock(config.ledger_file).close)
        ledger = Ledger.open(config.ledger_file)
        stack.callback(ledger.close)
        # Who may guess a task's id must not get past a proxy that asks for keys.
        keys = config.keys()
        tasks = TaskIndex(ledger.task_secret(), takes_unsigned=lambda: not keys)
        tasks.add(rows, by_text=True)
        tasks.add(ledger.tasks())
        hooks = await _start_hooks(config, stack)
        upstream = Upstream(config.swarm.url, config.swarm.key)
        stack.push_async_callback(upstream.close)
        room = Room(config.serve.max_siblings_in_flight)
        link = _follow(config, ledger, room, stack)
        settling = Delivery(ledger, link, config.feedback.window_s)
        stack.push_async_callback(settling.close)
        lifeline = await _lifeline(config, upstream, link, room, stack)
        resends = _resends(config, ledger)
        lockstep = Lockstep(config.job.seed, settling, link) if config.job.lockstep else None
        runner = Pipeline(config, upstream, hooks, ledger, settling, lifeline, resends, lockstep)
        stack.push_async_callback(runner.close)
        pause = Pause(pause_file(config.proxy.run_dir))
        traffic = TrafficGate(
            config.policy, pause, keys.name_of, trains=config.hooks.path is not None
        )
        told = "1 while nothing is fanned out."
        runner.metrics.gauge("fakevllm_paused", told, lambda: pause.is_on)
        told = "Groups that the swarm server's run dropped, by the reason's first word."
        runner.metrics.counts("fakevllm_groups_dropped", told, "reason", lambda: link.dropped)
        conversations = Conversations()
        conversations.restore(ledger.sessions.latest_requests(NUM_RESTORED))
        late = LateSamples(config.feedback, ledger, link)
        desk = FeedbackService(
            config.feedback, ledger, settling, late, hooks, tasks, runner.metrics
        )
        stack.push_async_callback(desk.close)
        settling.on_settled, runner.on_placed = late.group_settled, desk.followed
        # Together: what was said of a group is heard before that is sent.
        settling.resend(ledger.scored_groups())
        desk.restore()
        sending = asyncio.create_task(late.run())
        stack.push_async_callback(_cancel, sending)
        parts = (config, ledger, upstream, link, tasks, runner, conversations, traffic, resends)
        yield ProxyComponents(*parts, settling, desk)


def _rows(dataset: DatasetSection) -> list[Task]:
    return read_tasks(dataset.file, dataset.field) if dataset.file is not None else []


def _resends(config: Config, ledger: Ledger) -> ResendCache:
    """Off where nothing is fanned out: what is sent again costs no more than at a vLLM then."""
    window_s = 0.0 if config.hooks.path is None else config.serve.resend_window_s
    resends = ResendCache(window_s, ledger.kept)
    resends.restore()
    return resends


def _follow(
    config: Config, ledger: Ledger, room: Room, stack: contextlib.AsyncExitStack
) -> SwarmLink:
    queue = EngineQueue(lambda: room.in_flight > 0)
    link = SwarmLink(config.swarm.url, config.swarm.key, config.job, ledger, queue)
    stack.push_async_callback(link.close)
    following = asyncio.create_task(link.run())
    stack.push_async_callback(_cancel, following)
    return link


async def _lifeline(
    config: Config,
    upstream: Upstream,
    link: SwarmLink,
    room: Room,
    stack: contextlib.AsyncExitStack,
) -> Lifeline:
    fallback = Fallback.of(config.fallback)
    if fallback is not None:
        stack.push_async_callback(fallback.close)

    def served_name(asked: str) -> str | None:
        if asked == link.model or not is_alias(asked, config.models.aliases):
            return None
        if link.model is None:
            raise _model_unknown()
        return link.model

    return Lifeline(upstream, link, config.upstream.hold_s, fallback, served_name, room)


async def _start_hooks(config: Config, stack: contextlib.AsyncExitStack) -> HookWorker | None:
    if config.hooks.path is None:
        return None
    worker = HookWorker(config.hooks.path, config.hooks.timeout_s)
    stack.push_async_callback(worker.close)
    await worker.start()
    return worker


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
