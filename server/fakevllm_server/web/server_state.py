"""The whole state of a running server, and the start and stop of its engine. Routes act only
through this state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.redactor import Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.backends.process.engine_registry import open_backend
from fakevllm_server.backends.process.rollout_trainer_pairs import remove_left_weights
from fakevllm_server.config.engine_specs import engine_specs
from fakevllm_server.config.model import ConfigError, ServerConfig, find_model
from fakevllm_server.curves.trackers import folders_with_tables
from fakevllm_server.episodes.batch_selection import batches_waiting, method_of
from fakevllm_server.episodes.claim_limits import Participation
from fakevllm_server.episodes.collection_limit import (
    UNDER_WAY_S,
    UntrainedWork,
    may_begin_episode,
)
from fakevllm_server.episodes.episode_registry import EpisodeRegistry
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.job_identity import OTHER_JOB, JobIdentity, identity_of
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.fleet.replica import ReplicaFigures
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.fleet.router import NO_AFFINITY, CallAffinity
from fakevllm_server.journal.group_commit_writer import JournalError
from fakevllm_server.journal.store import Journal
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.metadata import engine_start
from fakevllm_server.run.model_identity import NO_MODEL, ModelIdentity, identify
from fakevllm_server.run.run_choice import TOP
from fakevllm_server.run.run_directory import RunDirectory
from fakevllm_server.run.run_list import RunSummary, list_runs
from fakevllm_server.run.tokenizer_reader import load_vocabulary
from fakevllm_server.training.call_retention import CallRetention
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.forget_service import ForgetService
from fakevllm_server.training.loop import LoopEnded, TrainLoop
from fakevllm_server.training.policies import PolicyLoader
from fakevllm_server.training.release_service import Action, ReleaseService, Result
from fakevllm_server.training.stop_and_restart import finish_reason
from fakevllm_server.training.submission_intake import Intake
from fakevllm_server.training.vocabulary_check import read_vocab_size
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.web.open_run import OpenRun
from fakevllm_server.web.stored_responses import StoredResponses

log = logging.getLogger("fakevllm.server")


HEALTH_CHECK_INTERVAL_S = 1.0
"""Seconds between health checks of an engine that failed a call and did not exit. The checks are
needed because no event reports that the engine is healthy again."""


@dataclass(slots=True)
class ServerState:
    """Configuration, engine, job, journal and training loop of one server process.

    The constructor raises ConfigError if the run directory, the model or the journal cannot be
    used.
    """

    config: ServerConfig
    engine: EngineLifecycle = field(default_factory=EngineLifecycle)
    job: TrainJob | None = None
    server_id: str = field(default_factory=new_id)
    """ID of this server process. It changes with each restart."""
    started_at: float = field(default_factory=time.time)
    """Unix time at which this server process started."""
    engine_client: EngineClient | None = None
    """Client of the engine. None until the engine's first boot has ended, and after the engine was
    stopped."""
    run: OpenRun = field(init=False)
    """The current run. Another run becomes current only when the engine is started for a job of
    that run."""
    engine_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held during the whole start or stop of an engine, and while a client sends a job. It
    prevents two errors. A stop could remove the socket of an engine that is being started. A job
    that arrives during a start could be trained in the run of another job."""
    _lock: RunFolder = field(init=False)
    """Lock of the run directory, which is held while the server runs."""
    _runs: RunDirectory = field(init=False)
    _follows_curves: bool = False
    """Whether the curves of the current run are written."""
    has_logged_direct_call: bool = False
    """Whether the log already mentions a call that bypassed the proxy."""
    responses: StoredResponses = field(default_factory=StoredResponses)
    """Responses that the clients of this server process may retrieve."""
    fleet: FleetRollout | None = None
    """The rollout replicas that answer calls, or that are being started. None if there is one
    rollout engine, and after the engine was stopped."""
    policies: PolicyLoader | None = None
    """Loader of earlier versions of the weights, or None while the engine is off."""
    release_service: ReleaseService = field(init=False)
    """Object that makes the decisions about versions of the current run."""
    forget_service: ForgetService = field(init=False)
    """Object that forgets groups of the current run."""
    _named_folders: Sequence[str] = ()
    """Folders with tables of sampled answers that the log has named already."""
    _pruning: asyncio.Task[None] | None = None
    """Task that prunes old calls of the current run."""
    _redaction: RedactionInUse = field(init=False)
    _redacted_job: TrainJob | None = None
    """Job whose settings `_redaction` has."""
    _model: ModelIdentity = NO_MODEL
    """Model with which the engine was started last."""
    vocab_size: int | None = None
    """Number of token ids of this model. None if it is unknown, and before the engine's first
    start."""
    _loop: TrainLoop | None = None
    _loop_task: asyncio.Task[None] | None = None
    _pending_start: asyncio.Task[None] | None = None
    """Task that starts the engine as soon as the journal can be written. None if the server did not
    need such a task at its start."""

    def __post_init__(self) -> None:
        self._redaction = RedactionInUse(self.config.privacy)
        self._lock = RunFolder(self.config.run_dir)
        self._runs = RunDirectory(self.config.run_dir)
        try:
            if self.config.model is not None:
                model = find_model(self.config.model, self.config.allow_hub)
                if self.config.models_dir is None:
                    self._lock.check_model(self.config.trainer_name, identify(model))
            self.run = self._open_run(self._runs.current)
        except BaseException:
            self._lock.close()
            raise
        self.job = self.run.job
        self.engine.global_step = self.runlog.last_step + 1
        self.release_service = self._new_release_service()
        self.forget_service = self._new_forget_service()

    def _new_forget_service(self) -> ForgetService:
        run = self.run
        return ForgetService(
            run.journal,
            run.runlog,
            run.intake,
            self.engine,
            self._between_steps,
            lambda: self._loop is not None and not self._loop.has_ended and self._loop.has_planned,
            run.run_id,
        )

    @property
    def privacy(self) -> PrivacySettings:
        """The settings for redaction and pruning in use: the settings from the server's flags,
        combined with the settings of its training job."""
        return self._redaction_in_use.settings

    @property
    def redactor(self) -> Redactor:
        """The redactor in use. Its settings combine the server's flags with the server's training
        job."""
        return self._redaction_in_use.redactor

    @property
    def _redaction_in_use(self) -> RedactionInUse:
        if self.job is not self._redacted_job:
            self._redacted_job = self.job
            self._redaction.set_other((self.job or TrainJob()).privacy_or_default)
        return self._redaction

    def _new_release_service(self) -> ReleaseService:
        run = self.run
        return ReleaseService(
            run.journal,
            run.runlog,
            run.releases,
            run.checkpoints,
            self._between_steps,
            run_id=run.run_id,
        )

    async def _between_steps(self, action: Action[Result]) -> Result:
        """Run an action at a time when no training step runs, and no engine starts or stops."""
        while True:
            loop = self._loop
            if loop is not None and not loop.has_ended:
                with contextlib.suppress(LoopEnded):
                    return await loop.between_steps(action)
            async with self.engine_lock:
                if self._loop is None or self._loop.has_ended:
                    result = await action(None)
                    self.engine.global_step = self.runlog.last_step + 1
                    return result

    def _open_run(self, relative: str) -> OpenRun:
        """Open a run. `relative` is its folder, relative to the run directory. Raises ConfigError
        if the run cannot be opened."""
        path = self._runs.folder(relative)
        return OpenRun(relative, self._lock if relative == TOP else RunFolder(path), self.engine)

    @property
    def journal(self) -> Journal:
        """The journal (SQLite file) of the server's current training run."""
        return self.run.journal

    @property
    def runlog(self) -> RunLog:
        """Log of the current run: its trained steps, rollbacks, dropped groups and evaluations."""
        return self.run.runlog

    @property
    def intake(self) -> Intake:
        """Object that accepts calls, groups and episodes for the current run."""
        return self.run.intake

    @property
    def run_id(self) -> str:
        """ID of the server's current training run. It stays the same when the server restarts."""
        return self.run.run_id

    @property
    def model(self) -> str | None:
        """Folder or name of the model with which the engine was started last. None for the fake
        engine, and before the engine's first start."""
        return self._model.model

    @property
    def episodes(self) -> EpisodeRegistry:
        return self.intake.episodes

    @property
    def pool(self) -> Pool:
        return self.intake.pool

    @property
    def participation(self) -> Participation:
        return self.intake.participation

    async def resume(self) -> None:
        """Start the engine if an engine was running when the previous server process died."""
        if self.job is None or not self.run.engine_runs:
            return
        log.info("resuming the run: its engine was running when the server died")
        if not await self._try_start():
            self._pending_start = asyncio.create_task(self._start_when_written())
            self._pending_start.add_done_callback(_log_failure)

    async def _start_when_written(self) -> None:
        """Wait until the journal can be written again, for example after the disk was full. Then
        start the engine, unless a client has started it."""
        is_done = False
        while not is_done:
            await self.journal.wait_written(self.journal.put(), None)
            is_done = await self._try_start()

    async def _try_start(self) -> bool:
        """Start the engine if it is offline. Return False if the start must be tried again later,
        because the journal cannot be written now. Return True in all other cases."""
        async with self.engine_lock:
            if self.engine.status is not EngineStatus.OFFLINE:
                return True
            try:
                await self.start_engine()
            except ConfigError as error:
                log.error("%s The engine stays offline.", error)
            except JournalError as error:
                log.error(
                    "the start of the engine cannot be written to the journal (%s); the engine is "
                    "started when the disk accepts writes again",
                    error,
                )
                return False
            return True

    async def start_engine(self) -> None:
        """Begin to boot the engine. The caller must hold `engine_lock`.

        Raises ConfigError if the job's model cannot be loaded. Raises JournalError if the start
        cannot be recorded.
        """
        job = self.job
        assert job is not None, "sync a job first"
        replicas, trainer = engine_specs(self.config, job)
        model = await asyncio.to_thread(identify, trainer.model)
        vocab_size = await asyncio.to_thread(read_vocab_size, trainer.model)
        weights_dir = self.config.weights_dir
        await asyncio.to_thread(remove_left_weights, trainer.run_dir, weights_dir)
        backend = open_backend(replicas, trainer, weights_dir)
        identity = await self._open_run_of(job, model)
        self._model, self.vocab_size = model, vocab_size
        record = engine_start(self.config, job, model.model, model.fingerprint)
        await asyncio.to_thread(self.run.folder.record_engine_start, record)
        self.intake.resume(job, time.monotonic(), identity)
        self.engine.move(EngineStatus.BOOTING, time.monotonic())
        self.fleet = backend.rollout if isinstance(backend.rollout, FleetRollout) else None
        save_freq = job.save_freq
        releases = self.run.releases
        checkpointer = Checkpointer(
            backend.trainer,
            self.run.checkpoints,
            self.journal,
            save_freq,
            lambda: releases.state.pinned,
            self.config.samples.keep_calls_s,
        )
        self.policies = PolicyLoader(
            backend,
            trainer,
            self.run.checkpoints,
            self.journal,
            lambda: self.engine.version,
            rejected=releases.rejected,
            on_pin=releases.set_answering,
        )
        self._loop = TrainLoop(
            job,
            self.engine,
            self.intake,
            backend,
            self.runlog,
            checkpointer,
            self.connect,
            cache(lambda: load_vocabulary(model.model)),
            training_limit=lambda: releases.training_limit,
        )
        self._loop_task = asyncio.create_task(self._loop.run())
        self._loop_task.add_done_callback(_log_failure)

    async def _open_run_of(self, job: TrainJob, model: ModelIdentity) -> JobIdentity:
        """Make a job's run the current run. Record in the run's journal that an engine is started
        with the job. Return the identity of the job.

        Raises ConfigError if the job's run cannot be opened or has another model. Raises
        JournalError if the start cannot be recorded. After an error, the current run is unchanged.
        """
        chosen = await asyncio.to_thread(self._runs.choose, job, model)
        identity = identity_of(job, model.fingerprint, chosen.experiment_name)
        is_current = chosen.folder == self.run.relative
        run = self.run if is_current else await asyncio.to_thread(self._open_run, chosen.folder)
        try:
            await asyncio.to_thread(run.folder.check_model, self.config.trainer_name, model)
            if not is_current:
                run.intake.refuse_groups(self.intake.known_groups)
            await self._drop_other_job(run, identity)
            run.record_start(job, identity)
            await run.journal.flush()
            if not is_current:
                await asyncio.to_thread(self._make_current, run)
        except BaseException:
            if not is_current:
                run.record_stop()
                await run.close()
            raise
        if not is_current:
            await self._replace_run(run)
        return identity

    def _make_current(self, run: OpenRun) -> None:
        """Record on disk that `run` is the current run. Raises ConfigError if the disk is full."""
        try:
            self._runs.make_current(run.relative)
        except OSError as error:
            raise ConfigError(
                f"The run {run.relative} cannot be made the current run ({error.strerror}): free "
                "disk space, and start the engine again."
            ) from None

    async def _replace_run(self, run: OpenRun) -> None:
        """Make `run`, which is already open, the current run. Close the previous run."""
        await self.release_service.close()
        await self.forget_service.close()
        previous, self.run = self.run, run
        self.release_service = self._new_release_service()
        self.forget_service = self._new_forget_service()
        self.engine.global_step = run.runlog.last_step + 1
        self.engine.version = 0
        if run.runlog.last_step:
            log.info("continuing the run in %s at step %d", run.path, self.engine.global_step)
        else:
            log.info("new run in %s", run.path)
        if self._follows_curves:
            run.follow_curves(self.config)
        await previous.close()

    async def _drop_other_job(self, run: OpenRun, identity: JobIdentity) -> None:
        """Drop the groups and episodes that wait to be trained in `run`, if they were collected for
        another job than the present job. `identity` has the settings that identify the present job.
        Raises JournalError if the journal cannot be written."""
        await run.journal.flush()
        changed = run.changed_settings(identity)
        num_dropped = run.intake.drop_waiting(OTHER_JOB) if changed else 0
        if num_dropped:
            log.warning(
                "%d waiting groups belong to the previous job and are dropped (%s): the new job "
                "has another %s",
                num_dropped,
                OTHER_JOB,
                " and ".join(changed),
            )

    async def stop_engine(self) -> None:
        """Stop training, and stop the engine. The engine's status is OFFLINE afterwards."""
        await self._cancel_pending_start()
        async with self.engine_lock:
            await self._stop_engine()

    async def _cancel_pending_start(self) -> None:
        pending, self._pending_start = self._pending_start, None
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    async def _stop_engine(self) -> None:
        loop, task = self._loop, self._loop_task
        if loop is not None and task is not None:
            await loop.stop(task)
        self._loop = self._loop_task = self.policies = None
        client, self.engine_client = self.engine_client, None
        self.fleet = None
        if client is not None:
            await _disconnect(client)
        self.intake.reopen_episodes()
        self.participation.is_paused = False
        self.run.record_stop()
        if self.engine.status is not EngineStatus.OFFLINE:
            self.engine.move(EngineStatus.OFFLINE, time.monotonic())

    async def close(self) -> None:
        """Stop the engine, close the current run's journal, and give up the lock of the run
        directory."""
        if self._pruning is not None:
            self._pruning.cancel()
            await asyncio.gather(self._pruning, return_exceptions=True)
        await self.stop_engine()
        await self.release_service.close()
        await self.forget_service.close()
        await self.run.close()
        self._lock.close()

    async def forget(self, request: ForgetGroupsRequest) -> ForgetGroupsReply:
        """Forget groups of the current run. The reply names the folders whose tables of sampled
        answers may still show their texts.

        Raises ForgettingPending and BackendError, as `ForgetService.forget`.
        """
        run_dir = self.run.path
        reply = await self.forget_service.forget(request)
        if not reply.versions:  # tables have trained groups only
            return reply
        folders = await asyncio.to_thread(folders_with_tables, run_dir)
        if folders and folders != self._named_folders:
            self._named_folders = folders
            log.warning(
                "Tables of samples in %s may show texts of groups that were forgotten or pruned: "
                "delete these folders while the server is stopped.",
                " and ".join(folders),
            )
        return reply.model_copy(update={"sample_folders": folders})

    def prune_calls(self) -> None:
        """Start a task that prunes old calls of the current run. `close` ends the task."""

        async def forget(group_ids: Sequence[str]) -> None:
            request = ForgetGroupsRequest(group_ids=list(group_ids))
            reply = await self.forget(request)
            if not reply.success:
                log.warning("old calls are not pruned completely: %s", reply.failure_reason)

        retention = CallRetention(lambda: self.privacy, lambda: self.run.journal, forget)
        self._pruning = asyncio.create_task(retention.run())

    def follow_curves(self) -> None:
        """Write the curves of the current run until `close` is called. If another run becomes
        current, write its curves from then on."""
        self._follows_curves = True
        self.run.follow_curves(self.config)

    async def list_runs(self) -> list[RunSummary]:
        """Return all training runs below the server's run directory, with their sizes."""
        return await asyncio.to_thread(list_runs, self.config.run_dir)

    def status_for(self, *, is_own_client: bool) -> EngineStatus:
        """Return the engine's status for a client.

        `is_own_client` is True if the client is fakevllm's own client, which always gets the
        current status. Other clients read the status rarely, and could miss a short state. If the
        job's training steps need the agreement of clients, each state of a step is therefore
        reported to other clients for a minimum time.
        """
        if is_own_client or self.job is None or not method_of(self.job).is_agreed_on:
            return self.engine.status
        return self.engine.agreement_status.at(time.monotonic())

    @property
    def closed_reason(self) -> str | None:
        """Reason why no more groups and episodes will be trained; None while training may continue.

        While the engine is off, a client may have sent a job for the engine's next start. This job
        may be meant for another run. Therefore training has ended only if the current run has
        reached the step limit of both its own job and the client's job.
        """
        if self._loop is not None:
            return self._loop.closed_reason
        jobs = [job for job in (self.run.job, self.job) if job is not None]
        reasons = [finish_reason(job, self.runlog.last_step) for job in jobs]
        return reasons[0] if reasons and all(reasons) else None

    @property
    def backlog(self) -> float:
        """Number of batches that the waiting groups and episodes would fill; it may be fractional.

        The number is at least 1 if a training step is due or will be retried. The batch of a
        running step does not count.
        """
        if self.job is None or self.closed_reason is not None:
            return 0.0
        is_rolling = self.engine.status is EngineStatus.ROLLING and not self.engine.async_step_runs
        is_retried = is_rolling and self._loop is not None and self._loop.has_planned
        return max(batches_waiting(self.pool.counts, self.job), float(is_retried))

    def may_begin_episode(self, now: float) -> bool:
        """Return True if a client may begin an episode of a new task. If the job collects batches
        ahead of the running training step, the result is False once enough of them are begun."""
        if self.job is None or self.closed_reason is not None:
            return True
        num_planned = 0 if self._loop is None else self._loop.num_planned_groups
        num_ended = self.pool.num_begun_episodes(now, UNDER_WAY_S)
        work = UntrainedWork(
            self.pool.num_finished + num_planned, self.episodes.num_training + num_ended
        )
        return may_begin_episode(work, self.job)

    @property
    def replicas(self) -> list[ReplicaFigures]:
        """The rollout replicas as users see them. The list is empty if there is one rollout engine,
        and while the engine is off."""
        is_off = self.engine.status is EngineStatus.OFFLINE
        return [] if self.fleet is None or is_off else self.fleet.figures

    @property
    def detail(self) -> str | None:
        """Message about a problem of the engine or the journal, or None if there is no problem."""
        error = self.journal.error
        if self._pending_start is not None and not self._pending_start.done():
            cause = error or "the disk is slow"
            return f"the engine is started when the journal can be written again: {cause}"
        return self.engine.detail or (error and f"the journal cannot be written: {error}")

    @property
    def is_healthy(self) -> bool:
        """Whether the server answers calls, or could start an engine. While the journal cannot be
        written, no engine can be started, but a running engine continues to serve."""
        return self.engine.is_serving or self.journal.error is None

    def notify_loop(self) -> None:
        """Wake the training loop, so that it checks whether enough groups wait for a training
        step."""
        if self._loop is not None:
            self._loop.notify()

    def attached_engine(self) -> EngineClient:
        """Return the HTTP client of the present engine. This engine answers calls, or is being
        restarted.

        Raises WireError (503) at once if there is no engine. There is no engine before the first
        engine is ready, and after the engine was stopped.
        """
        if self.engine_client is None or self.engine.status is EngineStatus.OFFLINE:
            raise self._not_ready()
        return self.engine_client

    def serving_engine(self) -> EngineClient:
        """Return the HTTP client of the engine if the engine answers calls. Otherwise raise
        WireError (503)."""
        client = self.attached_engine()
        if not self.engine.is_serving:
            raise self._not_ready()
        return client

    async def serving_replica(self) -> EngineClient:
        """Return the HTTP client of an engine that answers calls. Otherwise raise WireError
        (503)."""
        client = self.serving_engine()
        if self.fleet is None:
            return client
        replica = await self.fleet.client_for()
        if replica is None:
            raise self._not_ready()
        return replica

    async def wait_until_serving(
        self, failed: EngineClient | None = None, affinity: CallAffinity = NO_AFFINITY
    ) -> EngineClient:
        """Wait until the engine answers calls, and return the engine's HTTP client. The wait has no
        time limit. If there are several replicas, `affinity` decides which of them answers.

        `failed` is an HTTP client on which a call has failed. This client is returned only if its
        engine passes a health check. Raises WireError (503) before the first engine is ready, and
        after the engine was stopped.
        """
        while True:
            client = self.attached_engine()
            if self.engine.is_serving and (client is not failed or await client.is_healthy()):
                if client is self.engine_client:
                    fleet = self.fleet
                    if fleet is None:
                        return client
                    replica = await fleet.client_for(affinity, failed)
                    if replica is not None:
                        return replica
                    # All replicas are gone, and the training loop has not noticed it yet.
                    await fleet.wait_for_change(HEALTH_CHECK_INTERVAL_S)
                continue
            timeout_s = HEALTH_CHECK_INTERVAL_S if client is failed else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.engine.next_move()

    def _not_ready(self) -> WireError:
        detail = f" ({self.engine.detail})" if self.engine.detail else ""
        message = f"The engine is not ready: {self.engine.status}{detail}."
        return unavailable(message, OutageReason.ENGINE_NOT_READY)

    async def connect(self, endpoint: Endpoint) -> None:
        """Send all calls to a new engine at `endpoint` from now on, and close the HTTP client of
        the previous engine."""
        client = EngineClient(endpoint)
        await client.fetch_version()
        previous, self.engine_client = self.engine_client, client
        if previous is not None:
            await _disconnect(previous, next_endpoint=endpoint)
        self.run.folder.record_model(self.config.trainer_name, self._model)


async def _disconnect(client: EngineClient, next_endpoint: Endpoint | None = None) -> None:
    """Close the HTTP client of an engine that was replaced or stopped.

    Calls may be waiting at the engine's gate, which holds calls while the engine's weights are
    changed. These calls leave the gate and look for the next engine. There is one exception: if
    `next_endpoint` has the same gate, only the address of the same engine has changed, and the
    calls continue to wait.
    """
    if next_endpoint is None or next_endpoint.gate is not client.endpoint.gate:
        client.endpoint.gate.abandon()
    await client.close()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the training loop failed; training has stopped", exc_info=task.exception())
