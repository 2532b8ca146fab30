"""`SwarmClient` for one event loop: the same talks, the same names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any, Self

from fakevllm.sdk import batch_calls, engine_calls, episode_calls
from fakevllm.sdk.access import EpisodeAccess
from fakevllm.sdk.callbacks import tell_progress
from fakevllm.sdk.episode import AsyncEpisode
from fakevllm.sdk.http_driver import AsyncDriver, access_of
from fakevllm.sdk.open_claims import GIVE_UP_S
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.pool import EpisodeStatus, PoolInformation, ThrottlePolicy
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task, WorkflowOutput

log = logging.getLogger("fakevllm.sdk")


class AsyncSwarmClient:
    """Any number of tasks may use one at once; see `SwarmClient` for what each method does."""

    def __init__(
        self, server_url: str, verbose: bool = True, *, api_key: str | None = None
    ) -> None:
        if verbose:
            tell_progress()
        self.server_url = server_url.rstrip("/")
        self.client_uuid = new_id()
        self._run = (driver := AsyncDriver(self.server_url, api_key)).run
        self.close = driver.close
        self._was_on = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the engine

    async def status(self) -> EngineStatusReply:
        return await self._run(engine_calls.status())

    async def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        try:
            known = await self.status()
        except ServerUnreachable:
            return engine_calls.CANNOT_CONNECT, {}
        return known.engine_status, known.model_dump(mode="json")

    async def get_global_step(self) -> int:
        _, told = await self.get_engine_status()
        return int(told.get("global_step") or 0)

    async def sync_train_config(self, job: TrainJob) -> None:
        await self._run(engine_calls.sync_job(job))

    async def get_train_config(self) -> TrainJob | None:
        return await self._run(engine_calls.train_config())

    async def start_engine(self, timeout_s: float | None = None) -> None:
        await self._run(engine_calls.start(timeout_s))
        self._was_on = True

    async def stop_engine(self) -> None:
        await self._run(engine_calls.stop())

    async def auto_sync_train_config_and_start_engine(
        self, job: TrainJob, force_restart: bool = False, timeout_s: float | None = None
    ) -> None:
        await self._run(engine_calls.ensure_running(job, force_restart, timeout_s))
        self._was_on = True

    # --- episodes

    async def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: episode_calls.EpisodeType = "train",
        throttle_policy: ThrottlePolicy | None = None,
    ) -> tuple[str, EpisodeAccess]:
        talk = episode_calls.begin(
            self.client_uuid, episode_type, discard_episode_timeout, throttle_policy, self._was_on
        )
        is_over = asyncio.Event()
        begun = asyncio.create_task(self._run(talk, is_over))
        try:
            claim = await asyncio.shield(begun)
        except asyncio.CancelledError:
            # A claim that is just being granted would stay for as long as it may be idle.
            is_over.set()
            with contextlib.suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    await self.abort_episode((await begun).episode_uuid)
            raise
        self._was_on = True
        return claim.episode_uuid, access_of(self.server_url, claim)

    async def end_episode(
        self,
        task: Task,
        episode_uuid: str,
        workflow_output: WorkflowOutput,
        declare_client_active: bool = True,
    ) -> None:
        talk = episode_calls.end(
            self.client_uuid, task, episode_uuid, workflow_output, declare_client_active
        )
        await self._run(talk)

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
        policy = episode_calls.of_task(throttle_policy, task)
        uuid, access = await self.begin_episode(discard_episode_timeout, episode_type, policy)
        episode = AsyncEpisode(task, access, lambda output: self.end_episode(task, uuid, output))
        try:
            yield episode
        finally:
            if not episode.is_ended:
                # Also where the agent is being cancelled: the next claim need not wait for it.
                await asyncio.shield(self.abort_episode(uuid))

    # --- the batch that is being collected

    async def get_rollout_stat(self) -> PoolInformation:
        try:
            return await self._run(batch_calls.information())
        except SwarmError:
            return PoolInformation()

    async def get_episode_buffer(self) -> list[EpisodeStatus]:
        try:
            return await self._run(batch_calls.episode_buffer())
        except SwarmError:
            return []

    async def agree_sync_weight(self) -> bool:
        return await self._run(batch_calls.agree(self.client_uuid))

    async def server_experiment_dir(self) -> str:
        return await self._run(batch_calls.experiment_dir())
