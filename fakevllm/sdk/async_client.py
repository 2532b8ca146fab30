"""The client of a swarm server with async methods, for use in an event loop. The methods have the
same names and arguments as those of `SwarmClient`, but they are coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any, Self, TypeVar

from fakevllm.sdk import engine_control, episode_calls
from fakevllm.sdk.console import log_to_stderr
from fakevllm.sdk.episode import ABORT_LIMIT_S, AsyncEpisode, EpisodeAccess, episode_access
from fakevllm.sdk.http_driver import AsyncHttpDriver
from fakevllm.sdk.protocol import ServerCall
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.batch_status import EpisodeStatus, PoolInformation, ThrottlePolicy
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task, WorkflowOutput

log = logging.getLogger("fakevllm.sdk")
T = TypeVar("T")


class AsyncSwarmClient:
    """The client of a swarm server with async methods. Any number of asyncio tasks may share one
    client.

    The methods are documented in `SwarmClient`.
    """

    def __init__(
        self, server_url: str, verbose: bool = True, *, api_key: str | None = None
    ) -> None:
        if verbose:
            log_to_stderr()
        self.server_url = server_url.rstrip("/")
        self.client_uuid = new_id()
        self._driver = AsyncHttpDriver(self.server_url, api_key)
        self._has_seen_engine = False

    async def close(self) -> None:
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: ServerCall[T]) -> T:
        return await self._driver.run(call)

    # --- the engine

    async def status(self) -> EngineStatusReply:
        return await self._run(engine_control.status())

    async def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        try:
            reply = await self.status()
        except ServerUnreachable:
            return engine_control.CANNOT_CONNECT, {}
        return reply.engine_status, reply.model_dump(mode="json")

    async def get_global_step(self) -> int:
        _, status = await self.get_engine_status()
        return int(status.get("global_step") or 0)

    async def sync_train_config(self, job: TrainJob) -> None:
        await self._run(engine_control.sync_job(job))

    async def get_train_config(self) -> TrainJob | None:
        return await self._run(engine_control.train_config())

    async def start_engine(self, timeout_s: float | None = None) -> None:
        await self._run(engine_control.start(timeout_s))
        self._has_seen_engine = True

    async def stop_engine(self) -> None:
        await self._run(engine_control.stop())

    async def auto_sync_train_config_and_start_engine(
        self, job: TrainJob, force_restart: bool = False, timeout_s: float | None = None
    ) -> None:
        await self._run(engine_control.ensure_running(job, force_restart, timeout_s))
        self._has_seen_engine = True

    # --- episodes

    async def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: episode_calls.EpisodeType = "train",
        throttle_policy: ThrottlePolicy | None = None,
    ) -> tuple[str, EpisodeAccess]:
        call = episode_calls.begin(
            self.client_uuid,
            episode_type,
            discard_episode_timeout,
            throttle_policy,
            self._has_seen_engine,
        )
        is_cancelled = asyncio.Event()
        claiming = asyncio.create_task(self._driver.run(call, is_cancelled))
        try:
            claim = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # A claim that the server grants at this moment would otherwise last until it expires.
            is_cancelled.set()
            with contextlib.suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(ABORT_LIMIT_S):
                    await self.abort_episode((await claiming).episode_uuid)
            raise
        self._has_seen_engine = True
        return claim.episode_uuid, episode_access(self.server_url, claim)

    async def end_episode(
        self,
        task: Task,
        episode_uuid: str,
        workflow_output: WorkflowOutput,
        declare_client_active: bool = True,
    ) -> None:
        call = episode_calls.end(
            self.client_uuid, task, episode_uuid, workflow_output, declare_client_active
        )
        await self._run(call)

    async def abort_episode(self, episode_uuid: str, declare_client_active: bool = True) -> None:
        try:
            await self._run(
                episode_calls.abort(self.client_uuid, episode_uuid, declare_client_active)
            )
        except SwarmError as error:
            log.warning("episode %s was not aborted: %s", episode_uuid, error)

    async def can_continue_episode(self, episode_uuid: str) -> bool:
        try:
            return await self._run(episode_calls.can_continue(self.client_uuid, episode_uuid))
        except SwarmError:
            return False

    async def renew_episode(self, episode_uuid: str) -> None:
        await self._run(episode_calls.renew(self.client_uuid, episode_uuid))

    @contextlib.asynccontextmanager
    async def episode(
        self,
        task: Task,
        discard_episode_timeout: float = 240.0,
        episode_type: episode_calls.EpisodeType = "train",
        throttle_policy: ThrottlePolicy | None = None,
    ) -> AsyncGenerator[AsyncEpisode]:
        policy = episode_calls.with_task_id(throttle_policy, task)
        uuid, access = await self.begin_episode(discard_episode_timeout, episode_type, policy)
        episode = AsyncEpisode(task, access, lambda output: self.end_episode(task, uuid, output))
        try:
            yield episode
        finally:
            if not episode.is_ended:
                # The shield lets a cancelled agent abort too, so that the next claim need not wait.
                await asyncio.shield(self.abort_episode(uuid))

    # --- the batch that is being collected

    async def get_rollout_stat(self) -> PoolInformation:
        try:
            return await self._run(engine_control.pool_information())
        except SwarmError:
            return PoolInformation()

    async def get_episode_buffer(self) -> list[EpisodeStatus]:
        try:
            return await self._run(engine_control.episode_buffer())
        except SwarmError:
            return []

    async def agree_sync_weight(self) -> bool:
        return await self._run(engine_control.agree(self.client_uuid))

    async def server_experiment_dir(self) -> str:
        return await self._run(engine_control.experiment_dir())
