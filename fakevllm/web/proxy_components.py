"""Open the parts of a proxy together. Close the parts in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from fakevllm.admission.kill_switch import KillSwitch, pause_file
from fakevllm.admission.task_index import TaskIndex
from fakevllm.config.model import Config
from fakevllm.config.setting_origins import SettingSources
from fakevllm.forgetting.forgetter import Forgetter
from fakevllm.forgetting.retention import Retention
from fakevllm.forgetting.server_requests import ServerRequests
from fakevllm.gate.release_gate import ReleaseGate
from fakevllm.gate.training_limit import remove_training_limit
from fakevllm.groups.evaluator import Evaluator
from fakevllm.groups.reproducible_lockstep import Lockstep
from fakevllm.groups.request_admission import TrafficGate
from fakevllm.groups.request_arms import RequestArms
from fakevllm.groups.request_pipeline import Pipeline
from fakevllm.groups.resend_cache import ResendCache
from fakevllm.guard.guard_service import Guard
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.runtime.task_set import cancel_task
from fakevllm.sessions.session_index import NUM_RESTORED
from fakevllm.sessions.tree import SessionTree
from fakevllm.settlement.feedback_service import FeedbackService
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.swarm.model_names import ModelNames
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.tracing.tracing import Tracing
from fakevllm.transport.engine_client import EngineClient
from fakevllm.transport.fallback_server import Fallback
from fakevllm.transport.retry_handler import RetryHandler
from fakevllm.web.release_gauges import add_release_gauges
from fakevllm.web.server_gauges import add_server_gauges
from fakevllm.web.startup.arms import open_arms
from fakevllm.web.startup.forgetting import open_forgetting
from fakevllm.web.startup.gate import open_gate
from fakevllm.web.startup.gauges import add_call_gauges, add_loss_gauges, add_request_gauges
from fakevllm.web.startup.guard import open_guard
from fakevllm.web.startup.hook_reloads import RunningHooks, open_reloads
from fakevllm.web.startup.settlement import Settlement, open_settlement
from fakevllm.web.startup.shared_parts import SharedParts, open_shared_parts
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_runtime.open_files import DEFAULT_FILES, FileBudget


@dataclass(frozen=True, slots=True)
class ProxyComponents:
    """The parts of a running proxy that the proxy's routes use."""

    config: Config
    ledger: Ledger
    upstream: EngineClient
    retry_handler: RetryHandler
    link: SwarmLink
    tasks: TaskIndex
    model_names: ModelNames
    pipeline: Pipeline
    conversations: SessionTree
    traffic_gate: TrafficGate
    resends: ResendCache
    delivery: Delivery
    feedback: FeedbackService
    metrics: Metrics
    redaction: RedactionInUse
    """The redaction of what the ledger and the log store."""
    forgetter: Forgetter
    forget_requests: ServerRequests
    retention: Retention
    evaluator: Evaluator | None = None
    """Object that samples and scores held-out rows, which are never trained; None without hooks."""
    arms: RequestArms | None = None
    """Object that assigns sessions to arms, which decide which weights answer. None if all sessions
    are in the training arm."""
    gate: ReleaseGate | None = None
    """Object that evaluates versions and decides which version is released. None unless
    `release.mode` is `gated`."""
    guard: Guard | None = None
    """Object that notices when training goes wrong; None without hooks, or if all detectors are
    off."""
    hooks: RunningHooks | None = None
    """The user's hooks; None without hooks."""
    tracing: Tracing | None = None
    """Object that makes OpenTelemetry spans of requests; None if no spans are sent."""
    sources: SettingSources = field(default_factory=SettingSources)
    """The places from which `config` was read."""


@contextlib.asynccontextmanager
async def open_proxy(
    config: Config,
    files: FileBudget = DEFAULT_FILES,
    sources: SettingSources = SettingSources(),
) -> AsyncGenerator[ProxyComponents]:
    """Open all parts of a proxy. Close the parts when the block ends.

    `files` contains the number of files that the process may open. This number limits the open
    calls to the server, because each call needs a file descriptor. `sources` are the places from
    which `config` was read. Raise UserError for mistakes that the user can fix.
    """
    async with contextlib.AsyncExitStack() as stack:
        parts = await open_shared_parts(config, files, stack)
        ledger, link, metrics = parts.ledger, parts.link, parts.metrics
        settlement = open_settlement(parts, stack)
        retry_handler = _open_retry_handler(parts, stack)
        resends = _open_resend_cache(config, ledger)
        evaluator = _start_evaluator(parts, retry_handler, stack)
        arms = open_arms(parts, stack)
        gate = None
        if evaluator is not None and config.release.is_gated:
            gate = await open_gate(parts, evaluator, arms, stack)
            add_release_gauges(metrics, gate.view)
        if parts.hooks is not None and not config.release.is_between_steps:
            removing = asyncio.create_task(remove_training_limit(link))
            stack.push_async_callback(cancel_task, removing)
        pipeline = _open_pipeline(parts, settlement, retry_handler, resends, gate, arms, stack)
        stack.push_async_callback(settlement.feedback.close)
        pause = KillSwitch(pause_file(config.proxy.run_dir))
        traffic_gate = _traffic_gate(parts, pause)
        add_request_gauges(metrics, pipeline, pause, parts.tracing)
        add_call_gauges(metrics, parts.sibling_limit, parts.slots)
        add_loss_gauges(metrics, ledger, link)
        guard = await stack.enter_async_context(open_guard(config, ledger, link, pause, metrics))
        add_server_gauges(metrics, lambda: link.status)
        conversations = _restored_sessions(ledger)
        forgetting = open_forgetting(parts, pipeline, gate, stack)
        settlement.resume(ledger, stack)
        hooks = None if parts.hooks is None else open_reloads(parts, parts.hooks, stack)
        yield ProxyComponents(
            config=config,
            ledger=ledger,
            upstream=parts.upstream,
            retry_handler=retry_handler,
            link=link,
            tasks=parts.tasks,
            model_names=parts.model_names,
            pipeline=pipeline,
            conversations=conversations,
            traffic_gate=traffic_gate,
            resends=resends,
            delivery=settlement.delivery,
            feedback=settlement.feedback,
            metrics=metrics,
            redaction=parts.redaction,
            forgetter=forgetting.forgetter,
            forget_requests=forgetting.server_requests,
            retention=forgetting.retention,
            evaluator=evaluator,
            arms=arms,
            gate=gate,
            guard=guard,
            sources=sources,
            hooks=hooks,
            tracing=parts.tracing,
        )


def _open_retry_handler(parts: SharedParts, stack: contextlib.AsyncExitStack) -> RetryHandler:
    config = parts.config
    fallback = Fallback.from_settings(config.fallback)
    if fallback is not None:
        stack.push_async_callback(fallback.close)
    return RetryHandler(
        parts.upstream,
        parts.link,
        config.upstream.hold_s,
        fallback,
        parts.model_names.served_name,
        parts.sibling_limit,
        parts.slots,
    )


def _open_resend_cache(config: Config, ledger: Ledger) -> ResendCache:
    """Return the cache of recent answers. If an app sends the same request again, for example after
    a lost connection, the app gets the cached answer. Nothing is sampled again.

    Without hooks, the cache is switched off. Each request is then sampled only once, so a repeated
    request costs only one more sample, as with vLLM.
    """
    window_s = 0.0 if config.hooks.path is None else config.serve.resend_window_s
    resends = ResendCache(window_s, ledger.kept_answers)
    with ledger.reading():
        resends.restore()
    return resends


def _start_evaluator(
    parts: SharedParts, retry_handler: RetryHandler, stack: contextlib.AsyncExitStack
) -> Evaluator | None:
    """Return the object that samples and scores held-out rows, or None without hooks."""
    if parts.hooks is None:
        return None
    floor = parts.config.reward.failure_floor
    evaluator = Evaluator(
        parts.upstream, retry_handler, parts.hooks, parts.ledger, parts.link, floor
    )
    stack.push_async_callback(cancel_task, asyncio.create_task(evaluator.run()))
    return evaluator


def _open_pipeline(
    parts: SharedParts,
    settlement: Settlement,
    retry_handler: RetryHandler,
    resends: ResendCache,
    gate: ReleaseGate | None,
    arms: RequestArms | None,
    stack: contextlib.AsyncExitStack,
) -> Pipeline:
    """Return the object that answers requests."""
    job, delivery = parts.config.job, settlement.delivery
    pipeline = Pipeline(
        parts.config,
        parts.upstream,
        parts.hooks,
        parts.ledger,
        delivery,
        retry_handler,
        resends,
        parts.metrics,
        lockstep=Lockstep(job.seed, delivery, parts.link) if job.lockstep else None,
        on_placed=settlement.feedback.request_placed,
        on_scored=None if gate is None else gate.rewards_seen,
        arms=arms,
    )
    stack.push_async_callback(pipeline.close)
    return pipeline


def _traffic_gate(parts: SharedParts, pause: KillSwitch) -> TrafficGate:
    trains = parts.config.hooks.path is not None
    return TrafficGate(
        parts.config.policy, pause, parts.tasks.key_names, held_out=parts.held_out, trains=trains
    )


def _restored_sessions(ledger: Ledger) -> SessionTree:
    """Return the sessions that were known when an earlier proxy process ended."""
    conversations = SessionTree()
    with ledger.reading():
        conversations.restore(
            ledger.sessions.latest_requests(NUM_RESTORED),
            now=time.monotonic(),
            unix_now=time.time(),
        )
    return conversations
