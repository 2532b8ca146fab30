"""Open the parts of a proxy together. Close the parts in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import aiohttp

from fakevllm.admission.dataset import read_tasks
from fakevllm.admission.held_out import NUM_SAFE_CHARS, HeldOutRows
from fakevllm.admission.kill_switch import KillSwitch, pause_file
from fakevllm.admission.row_requests import read_held_out_rows
from fakevllm.admission.task_index import TaskIndex
from fakevllm.config.model import Config, DatasetSection
from fakevllm.config.setting_origins import SettingSources
from fakevllm.errors import ConfigError
from fakevllm.evaluation.messages import trained_text
from fakevllm.forgetting.forgetter import Forgetter
from fakevllm.forgetting.retention import Retention
from fakevllm.forgetting.retention_rules import RetentionRules
from fakevllm.forgetting.server_requests import REMEDIES, ServerProblem, ServerRequests
from fakevllm.gate.arm_policies import ArmPolicies
from fakevllm.gate.held_out_evaluation import EvaluationRows, SampledRow
from fakevllm.gate.release_gate import NO_RELEASED_ARM, ReleasedArm, ReleaseGate
from fakevllm.gate.training_limit import remove_training_limit
from fakevllm.groups.evaluator import Evaluator, row_draft
from fakevllm.groups.reproducible_lockstep import Lockstep
from fakevllm.groups.request_admission import TrafficGate
from fakevllm.groups.request_arms import RequestArms
from fakevllm.groups.request_pipeline import Pipeline
from fakevllm.groups.resend_cache import ResendCache
from fakevllm.guard.guard_service import Guard
from fakevllm.hooks.hook_file_watch import HookFileWatch
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.sandbox import HookSandbox
from fakevllm.hooks.version_leases import Use
from fakevllm.ledger.lock import LedgerLock
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.release.arm_gains import ArmGains
from fakevllm.release.arms import Arm, ArmAssigner, Shares
from fakevllm.release.between_steps import BetweenStepsController
from fakevllm.release.controller import GateController, GateRules
from fakevllm.rescoring.hook_reloader import HookReloader
from fakevllm.rescoring.hook_trial import HookTrial
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.task_set import cancel_task
from fakevllm.sessions.session_index import NUM_RESTORED
from fakevllm.sessions.tree import SessionTree
from fakevllm.settlement.edit_samples import EditSamples
from fakevllm.settlement.feedback_service import FeedbackService
from fakevllm.settlement.held_out_groups import HeldOutGroups
from fakevllm.settlement.late_feedback import LateSamples
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm.swarm.errors import NETWORK_ERRORS, describe_error
from fakevllm.swarm.load_probe import LoadProbe
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.tracing.tracing import Tracing, open_tracing
from fakevllm.transport.call_slots import SIBLINGS_PER_SLOT, CallSlots
from fakevllm.transport.engine_client import EngineClient
from fakevllm.transport.fallback_server import Fallback
from fakevllm.transport.retry_handler import RetryHandler
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm.web.arm_views import add_arm_gauges
from fakevllm.web.guard_opening import open_guard
from fakevllm.web.release_gauges import add_release_gauges
from fakevllm.web.server_gauges import add_server_gauges
from fakevllm.web.trained_rows import trained_rows
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.protocol.errors import unavailable, unknown_model
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.policy_names import is_policy_name
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_runtime.open_files import DEFAULT_FILES, FileBudget

log = logging.getLogger("fakevllm.web.proxy_components")

PREPARE_S = 3.0
"""When the proxy starts, it waits for up to this many seconds until the server has said which
version is released. A longer wait would not help: without the server, apps get no answers."""
_MODEL_UNKNOWN = "The engine is not ready: the swarm server has not reported which model it serves."


class ModelNames:
    """The aliases of the served model (other names by which apps may request the model)."""

    def __init__(self, aliases: Sequence[str], link: SwarmLink) -> None:
        """Store the aliases. The alias `*` stands for every name. `link` is the connection to the
        server, which reports the name of the served model."""
        self._aliases = aliases
        self._link = link

    def is_alias(self, name: str) -> bool:
        """Return True if `name` is an alias. An alias must be replaced by the served model's
        name."""
        if name == self._link.model:
            return False
        return name in self._aliases or ("*" in self._aliases and name != "")

    def served_name(self, name: str) -> str | None:
        """Return the served model's name if `name` is an alias. Return None if `name` is no alias.
        Raise WireError (503) if `name` is an alias and the server has not reported its model
        yet."""
        if not self.is_alias(name):
            return None
        return self.reported()

    def reported(self) -> str:
        """Return the served model's name. Raise WireError (503) if the server has not reported its
        model yet."""
        if self._link.model is None:
            raise unavailable(_MODEL_UNKNOWN, OutageReason.ENGINE_NOT_READY)
        return self._link.model

    def refuse_policy(self, name: str) -> None:
        """Raise WireError if `name` is the name of a policy (a loaded version of the weights). Only
        evaluations may sample policies by name.

        The status is 404, as for an unknown model. The status is 503 if the server has not reported
        its model yet. The served model itself may have a name that looks like a policy's name.
        """
        if not is_policy_name(name) or name == self._link.model or self.is_alias(name):
            return
        raise unknown_model(name, self.reported())


@dataclass(frozen=True, slots=True)
class RunningHooks:
    """The user's hooks, and the objects that reload them."""

    versions: HookVersions
    reloader: HookReloader
    files: HookFileWatch
    """Object that notices changes of the hook files."""


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
        rows = _dataset_rows(config.dataset)
        held_out = _held_out_rows(config, rows)
        stack.callback(LedgerLock(config.ledger_file).close)
        redaction = RedactionInUse(config.job.privacy_or_default)
        ledger = Ledger.open(config.ledger_file, redaction=redaction)
        stack.callback(ledger.close)
        keys = config.keys()
        with ledger.reading():
            tasks = TaskIndex(ledger.task_secret(), keys)
            tasks.add_dataset(rows)
            for stored in ledger.tasks():
                tasks.add([stored.task], stored.owner)
        tracing = open_tracing(
            config.tracing, os.environ, ledger.redactor, config.swarm.url, config.fallback.url
        )
        if tracing is not None:
            stack.push_async_callback(tracing.close)
        hooks = await _start_hooks(config, stack, redaction)
        upstream = EngineClient(config.swarm.url, config.swarm.key)
        stack.push_async_callback(upstream.close)
        slots = CallSlots(min(config.limits.num_calls, files.num_calls))
        max_siblings = SIBLINGS_PER_SLOT * slots.num_slots
        configured = config.serve.max_siblings_in_flight or max_siblings
        sibling_limit = SiblingLimit(min(configured, max_siblings))
        link = _start_link(config, ledger, sibling_limit, stack, redaction)
        model_names = ModelNames(config.models.aliases, link)
        held_out_groups = HeldOutGroups(held_out, ledger)
        late = LateSamples(config.feedback, ledger, link, held_out_groups)
        edits = EditSamples(config.feedback, ledger, link, held_out_groups)

        def group_settled(group_id: str) -> None:
            late.group_settled(group_id)
            edits.group_settled(group_id)

        delivery = Delivery(
            ledger,
            link,
            config.feedback.window_s,
            group_settled,
            on_final=lambda group_id: hooks.end(group_id, Use.FEEDBACK) if hooks else None,
            held_out=held_out_groups,
        )
        stack.push_async_callback(delivery.close)
        fallback = Fallback.from_settings(config.fallback)
        if fallback is not None:
            stack.push_async_callback(fallback.close)
        retry_handler = RetryHandler(
            upstream,
            link,
            config.upstream.hold_s,
            fallback,
            model_names.served_name,
            sibling_limit,
            slots,
        )
        metrics = Metrics()
        feedback = FeedbackService(
            config.feedback, ledger, delivery, late, edits, hooks, tasks, metrics, redaction
        )
        with ledger.reading():
            resends = _open_resend_cache(config, ledger)
        evaluator = None
        if hooks is not None:
            floor = config.reward.failure_floor
            evaluator = Evaluator(upstream, retry_handler, hooks, ledger, link, floor)
            unloading = asyncio.create_task(evaluator.run())
            stack.push_async_callback(cancel_task, unloading)
        arms = _open_arms(config, ledger, link, metrics, stack)
        gate = None
        if evaluator is not None and config.release.is_gated:
            gate = await _open_gate(
                config, ledger, tasks, link, evaluator, model_names, arms, stack
            )
            add_release_gauges(metrics, gate.view)
        if hooks is not None and not config.release.is_between_steps:
            removing = asyncio.create_task(remove_training_limit(link))
            stack.push_async_callback(cancel_task, removing)
        pipeline = Pipeline(
            config,
            upstream,
            hooks,
            ledger,
            delivery,
            retry_handler,
            resends,
            metrics,
            lockstep=Lockstep(config.job.seed, delivery, link) if config.job.lockstep else None,
            on_placed=feedback.request_placed,
            on_scored=None if gate is None else gate.rewards_seen,
            arms=arms,
        )
        stack.push_async_callback(pipeline.close)
        stack.push_async_callback(feedback.close)
        pause = KillSwitch(pause_file(config.proxy.run_dir))
        trains = config.hooks.path is not None
        traffic_gate = TrafficGate(
            config.policy, pause, tasks.key_names, held_out=held_out, trains=trains
        )
        metrics.gauge(
            "fakevllm_requests_open", "Requests being answered.", lambda: pipeline.num_open
        )
        metrics.gauge("fakevllm_paused", "1 while no request becomes a group.", lambda: pause.is_on)
        metrics.labelled_gauge(
            "fakevllm_traced_requests",
            "Requests whose OpenTelemetry spans were sent, could not be sent, or were dropped "
            "because the collector is too slow.",
            "outcome",
            lambda: {} if tracing is None else tracing.counts,
        )
        _add_gauges(metrics, ledger, link, sibling_limit, slots)
        guard = await stack.enter_async_context(open_guard(config, ledger, link, pause, metrics))
        add_server_gauges(metrics, lambda: link.status)
        conversations = SessionTree()
        with ledger.reading():
            conversations.restore(
                ledger.sessions.latest_requests(NUM_RESTORED),
                now=time.monotonic(),
                unix_now=time.time(),
            )
            # No await between these two: a group's stored feedback must be counted before the group
            # is sent.
            delivery.resend(ledger.scored_groups())
            feedback.restore()
        forgetter = Forgetter(ledger, wait_answered=pipeline.wait_answered)
        forget_requests = _forget_requests(ledger, link)
        retention = Retention(
            RetentionRules(config.job.privacy_or_default),
            ledger,
            forgetter,
            tuple if gate is None else lambda: gate.open_evaluations,
        )
        for work in (forget_requests.run(), retention.run()):
            stack.push_async_callback(cancel_task, asyncio.create_task(work))
        for work in (late.run(), edits.run()):
            stack.push_async_callback(cancel_task, asyncio.create_task(work))
        running_hooks = None
        if hooks is not None:
            running_hooks = _open_reloads(config, hooks, ledger, tasks, redaction, stack)
        yield ProxyComponents(
            config=config,
            ledger=ledger,
            upstream=upstream,
            retry_handler=retry_handler,
            link=link,
            tasks=tasks,
            model_names=model_names,
            pipeline=pipeline,
            conversations=conversations,
            traffic_gate=traffic_gate,
            resends=resends,
            delivery=delivery,
            feedback=feedback,
            metrics=metrics,
            redaction=redaction,
            forgetter=forgetter,
            forget_requests=forget_requests,
            retention=retention,
            evaluator=evaluator,
            arms=arms,
            gate=gate,
            guard=guard,
            sources=sources,
            hooks=running_hooks,
            tracing=tracing,
        )


def _open_arms(
    config: Config,
    ledger: Ledger,
    link: SwarmLink,
    metrics: Metrics,
    stack: contextlib.AsyncExitStack,
) -> RequestArms | None:
    """Return the object that assigns sessions to arms. The arm of a session decides which weights
    answer the session. Return None if all sessions are in the training arm, which the served
    weights answer."""
    release = config.release
    if release.is_gated and config.hooks.path is None:
        raise ConfigError(
            'release.mode "gated" needs hooks, which score the held-out rows: set hooks.path, or '
            "take release.mode out."
        )
    if release.baseline_share == 0 and not release.has_released_arm:
        return None
    if config.hooks.path is None:
        log.warning(
            "release.baseline_share has no effect without hooks, because nothing is trained: set "
            "hooks.path, or take it out"
        )
        return None
    advice = (
        "Set release.baseline_version to a version that can be sampled, or release.baseline_share "
        "to 0."
    )
    shares = Shares.continuous(release.baseline_share)
    versions = {Arm.BASELINE: release.baseline_version} if release.baseline_share else {}
    if release.has_released_arm:
        advice = (
            "Release another version with `fakevllm release promote`, or, if the engine cannot "
            "hold several versions (vLLM can if the server starts it with "
            "--engine-arg=--enable-lora for a job with lora_rank), set release.evaluation "
            'to "between_steps".'
        )
        rest = 1 - release.canary_share - release.baseline_share
        shares = Shares(release.canary_share, rest, release.baseline_share)
        versions[Arm.RELEASED] = 0  # until the gate has read which version is released
    with ledger.reading():
        arms = RequestArms(
            ArmAssigner(ledger.arm_salt(), shares),
            ArmPolicies(link, versions, advice),
            ArmGains(RewardRange(*release.reward_range)),
            ledger.arms,
            lambda: link.model,
        )
    running = asyncio.create_task(arms.run())
    stack.push_async_callback(arms.close, running)
    add_arm_gauges(metrics, arms)
    return arms


def _forget_requests(ledger: Ledger, link: SwarmLink) -> ServerRequests:
    async def send(request: ForgetGroupsRequest) -> ForgetGroupsReply:
        try:
            return await link.forget_groups(request)
        except (*NETWORK_ERRORS, ValueError) as error:  # translated
            if isinstance(error, aiohttp.ClientResponseError) and error.status in REMEDIES:
                raise ServerProblem(REMEDIES[error.status]) from None
            raise ServerProblem(describe_error(error)) from None

    async def find_run() -> str:
        if link.status is None:
            raise ServerProblem("is out of reach")
        return link.status.run_id

    return ServerRequests(ledger, send, find_run)


async def _open_gate(
    config: Config,
    ledger: Ledger,
    tasks: TaskIndex,
    link: SwarmLink,
    evaluator: Evaluator,
    model_names: ModelNames,
    arms: RequestArms | None,
    stack: contextlib.AsyncExitStack,
) -> ReleaseGate:
    """Start the release gate. The gate decides which version of the weights is released. Wait up to
    PREPARE_S seconds until the gate knows the released version."""
    release = config.release
    assert release.eval_dataset is not None, "the configuration of a gate names held-out rows"

    file, rows = release.eval_dataset, read_tasks(release.eval_dataset, config.dataset.field)

    async def sample(task: Task, version: int | None, eval_id: str) -> SampledRow:
        draft = row_draft(task, model_names.reported(), link.engine)
        row = await evaluator.evaluate(draft, release.eval_samples, eval_id, version)
        samples = row.group.siblings[1:]  # the first one is greedy
        rewards = [sibling.reward for sibling in samples if sibling.reward is not None]
        return SampledRow(rewards, row.reason, row.group.hook_hash, row.group.eval_version)

    def check_rows() -> str | None:
        texts = [task.main_query for task in rows]
        # Groups that were not sent yet are dropped if they quote a held-out row.
        positions = trained_rows(ledger, tasks, texts, with_unsent=False)
        trained = [texts[position] for position in positions]
        if not trained:
            return None
        advice = "take them out of the file, or name another file, and restart the proxy"
        return f"{trained_text(file, trained)}: {advice}"

    gate = ReleaseGate(
        GateRules(
            RewardRange(*release.reward_range),
            num_samples=release.eval_samples,
            evaluate_every=release.evaluate_every,
            margin=release.margin,
            alpha=release.alpha,
            max_samples=release.max_samples,
        ),
        EvaluationRows(
            rows,
            sample,
            ledger.evaluated_rows,
            evaluator.unload,
            hook_hash=lambda: evaluator.hook_hash,
            check=check_rows,
            flush=ledger.flush,
        ),
        link,
        _released_arm(arms) if release.has_released_arm else NO_RELEASED_ARM,
        pinned=[release.baseline_version] if release.baseline_share else [],
        controller=BetweenStepsController if release.is_between_steps else GateController,
    )
    if arms is not None:
        arms.on_outcome = gate.group_scored
    await gate.prepare(PREPARE_S)
    running = asyncio.create_task(gate.run())
    stack.push_async_callback(cancel_task, running)
    return gate


def _released_arm(arms: RequestArms | None) -> ReleasedArm:
    assert arms is not None, "a proxy whose released version answers sessions has arms"
    policies = arms.policies
    return ReleasedArm(
        set_version=lambda version: policies.set_version(Arm.RELEASED, version),
        trouble=lambda: policies.trouble(Arm.RELEASED),
        is_loading=lambda: policies.is_loading(Arm.RELEASED),
    )


def _add_gauges(
    metrics: Metrics,
    ledger: Ledger,
    link: SwarmLink,
    sibling_limit: SiblingLimit,
    slots: CallSlots,
) -> None:
    metrics.gauge(
        "fakevllm_siblings_in_flight",
        "Siblings at the engine, without the leads.",
        lambda: sibling_limit.in_flight,
    )
    metrics.gauge(
        "fakevllm_calls_open", "Calls that hold a slot at the server.", lambda: slots.num_open
    )
    metrics.labelled_gauge(
        "fakevllm_calls_waiting",
        "Calls that wait in the proxy for a slot at the server.",
        "kind",
        lambda: {"lead": slots.num_waiting_leads, "sibling": slots.num_waiting_siblings},
    )
    metrics.gauge(
        "fakevllm_ledger_dropped",
        "Writes that the ledger gave up.",
        lambda: ledger.health.dropped,
    )
    metrics.labelled_gauge(
        "fakevllm_groups_dropped",
        "Groups that the swarm server's run dropped, by the first word of the reason.",
        "reason",
        lambda: link.dropped,
    )


def _dataset_rows(dataset: DatasetSection) -> list[Task]:
    return read_tasks(dataset.file, dataset.field) if dataset.file is not None else []


def _held_out_rows(config: Config, rows: list[Task]) -> HeldOutRows:
    """Return the held-out rows, which are used only for evaluations. Raise ConfigError if the
    held-out file has no rows. Raise ConfigError if the training dataset contains a held-out row,
    because a held-out row must not be trained."""
    file = config.release.eval_dataset
    if file is None:
        return HeldOutRows()
    held_out = read_held_out_rows(file, config.dataset.field)
    if overlap := held_out.overlapping(rows):
        are, them = ("is", "it") if len(overlap) == 1 else ("are", "them")
        raise ConfigError(
            f"{counted(len(overlap), 'row')} of the dataset {config.dataset.file} {are} held out "
            f"by release.eval_dataset {file} (the first: {overlap[0].main_query[:60]!r}): take "
            f"{them} out of one of the two files."
        )
    if short := held_out.short:
        log.warning(
            "%s of the held-out dataset %s %s less than %d characters (the first: %r): no "
            "request that contains such a text is trained, so write longer rows",
            counted(len(short), "row"),
            file,
            "has" if len(short) == 1 else "have",
            NUM_SAFE_CHARS,
            short[0],
        )
    return held_out


def _open_resend_cache(config: Config, ledger: Ledger) -> ResendCache:
    """Return the cache of recent answers. If an app sends the same request again, for example after
    a lost connection, the app gets the cached answer. Nothing is sampled again.

    Without hooks, the cache is switched off. Each request is then sampled only once, so a repeated
    request costs only one more sample, as with vLLM.
    """
    window_s = 0.0 if config.hooks.path is None else config.serve.resend_window_s
    resends = ResendCache(window_s, ledger.kept_answers)
    resends.restore()
    return resends


def _start_link(
    config: Config,
    ledger: Ledger,
    sibling_limit: SiblingLimit,
    stack: contextlib.AsyncExitStack,
    redaction: RedactionInUse,
) -> SwarmLink:
    load_probe = LoadProbe(lambda: sibling_limit.in_flight > 0)
    link = SwarmLink(config.swarm.url, config.swarm.key, config.job, ledger, load_probe, redaction)
    stack.push_async_callback(link.close)
    following = asyncio.create_task(link.run())
    stack.push_async_callback(cancel_task, following)
    return link


async def _start_hooks(
    config: Config, stack: contextlib.AsyncExitStack, redaction: RedactionInUse
) -> HookVersions | None:
    if config.hooks.path is None:
        if config.hooks.watch:
            raise ConfigError(
                "hooks.watch (--watch-hooks) needs hooks: set hooks.path (--hooks), or take it out."
            )
        return None
    worker = _new_worker(config, redaction)
    try:
        await worker.start()
    except BaseException:
        await worker.close()
        raise
    versions = HookVersions(worker)
    stack.push_async_callback(versions.close)
    return versions


def _new_worker(config: Config, redaction: RedactionInUse) -> HookWorker:
    assert config.hooks.path is not None, "only a proxy with hooks runs them"
    sandbox = HookSandbox(config.hooks.environment, config.hooks.memory_mb)
    return HookWorker(config.hooks.path, config.hooks.timeout_s, sandbox, redaction=redaction)


def _open_reloads(
    config: Config,
    versions: HookVersions,
    ledger: Ledger,
    tasks: TaskIndex,
    redaction: RedactionInUse,
    stack: contextlib.AsyncExitStack,
) -> RunningHooks:
    """Start to watch the hook files, and return the objects that reload the hooks."""
    assert config.hooks.path is not None, "only a proxy with hooks reloads them"

    def find_task(task_id: str) -> Task | None:
        return tasks.by_id(task_id) or ledger.task(task_id)

    limits = config.hooks.reload
    trial = HookTrial(ledger, config.ledger_file, find_task, limits, config.reward.failure_floor)
    reloader = HookReloader(versions, lambda: _new_worker(config, redaction), trial, limits.max_s)
    stack.push_async_callback(reloader.close)
    files = HookFileWatch(
        config.hooks.path,
        lambda: versions.info.content_hash,
        reloader.reload_edited if config.hooks.watch else None,
    )
    watching = asyncio.create_task(files.run())
    stack.push_async_callback(cancel_task, watching)
    return RunningHooks(versions, reloader, files)
