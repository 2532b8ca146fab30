"""A training loop with the parts that it drives, for tests that make these parts fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from swarm_server.local_engines import LocalRollout, LocalTrainer, SleepingRollout
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.releases import (
    Decision,
    ReleaseReply,
    ReleaseRequest,
    ReleasesReply,
    RollbackRequest,
    TrainingLimitRequest,
)
from fakevllm_adapters.protocol.swarm import (
    EndGroupReply,
    EndGroupRequest,
    EngineStatus,
    SiblingRef,
)
from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses
from fakevllm_server.episodes.episode_registry import EpisodeRegistry
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.forest.call_text_comparison import Vocabulary
from fakevllm_server.journal import reads
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.releases import Releases
from fakevllm_server.training import loop
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.release_service import ReleaseService
from fakevllm_server.training.submission_intake import Intake
from fakevllm_server.types.backend import Backend, Endpoint
from fakevllm_server.types.calls import RecordedCall

AnyBackend = TypeVar("AnyBackend", bound=Backend)
JOB = TrainJob(num_repeat=2, batch_size=1, lr=0.1, save_freq=1)


class Run(Generic[AnyBackend]):
    """A run with a journal, an intake, a backend and a running training loop."""

    def __init__(
        self,
        folder: Path,
        backend: AnyBackend,
        job: TrainJob = JOB,
        vocabulary: Callable[[], Vocabulary] = Vocabulary,
    ) -> None:
        self.engine = EngineLifecycle()
        self.endpoints: list[Endpoint] = []
        self.backend = backend
        self.journal = Journal(folder / "journal.sqlite")
        self.log = RunLog(self.journal)
        self.releases = Releases(self.journal, self.log)
        self.intake = Intake(self.journal, self.log, self.engine, self.releases.rejected)
        self.intake.resume(job, now=0.0)
        self.folders = CheckpointFolders(folder / "checkpoints")
        self.loop = loop.TrainLoop(
            job,
            self.engine,
            self.intake,
            self.backend,
            self.log,
            Checkpointer(
                backend.trainer,
                self.folders,
                self.journal,
                job.save_freq,
                lambda: self.releases.state.pinned,
            ),
            self._connect,
            vocabulary,
            training_limit=lambda: self.releases.training_limit,
        )
        self.service = ReleaseService(
            self.journal, self.log, self.releases, self.folders, self.loop.between_steps
        )
        self.engine.move(EngineStatus.BOOTING, 0.0)
        self.task = asyncio.create_task(self.loop.run())

    async def finish_group(self, name: str, *rewards: float) -> None:
        await self.rolling()
        await self.pool_group(name, *rewards)

    async def pool_group(self, name: str, *rewards: float) -> None:
        rewards = rewards or (1.0, 0.0)
        await self.capture(name, *[call() for _ in rewards])
        assert (await self.end_group(name, *rewards)).pooled

    @property
    def pool(self) -> Pool:
        return self.intake.pool

    @property
    def episodes(self) -> EpisodeRegistry:
        return self.intake.episodes

    async def capture(self, name: str, *calls: RecordedCall) -> None:
        """Add one captured call for each sibling of the group."""
        for index, each in enumerate(calls):
            await self.intake.add_call(SiblingRef(name, index), each)

    async def end_group(self, name: str, *rewards: float) -> EndGroupReply:
        # Not validated: a journal may have a reward that the routes no longer accept.
        end = EndGroupRequest.model_construct(group_id=name, rewards=list(rewards))
        reply = await self.intake.end_group(end, self.loop.closed_reason)
        self.loop.notify()
        return reply

    @property
    def saved_steps(self) -> list[int]:
        """Steps of the saved checkpoints, newest first."""
        return [saved.step for saved in self.journal.read(reads.checkpoints)]

    @property
    def trained_groups(self) -> dict[str, int]:
        """Step that trained each group that is part of the present weights."""
        query = "SELECT group_id, step FROM groups WHERE state = 'consumed'"
        return dict(self.journal.read(lambda db: db.exec_driver_sql(query).all()))

    @property
    def dropped_groups(self) -> dict[str, str]:
        query = "SELECT group_id, reason FROM groups WHERE state = 'dropped'"
        return dict(self.journal.read(lambda db: db.exec_driver_sql(query).all()))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert not self.task.done(), "the loop ended"
                await asyncio.sleep(0)

    async def rolling(self) -> None:
        await self.until(lambda: self.engine.status is EngineStatus.ROLLING)

    async def trained(self, name: str) -> None:
        await self.until(
            lambda: name in self.trained_groups and self.engine.status is EngineStatus.ROLLING
        )

    async def decide(
        self, decision: Decision, version: int | None = None, **fields: Any
    ) -> ReleaseReply:
        """Make a decision about a version. The default id contains the decision and the version."""
        body = {"id": f"{decision} {version}", "decision": decision, "version": version}
        return await self.service.decide(ReleaseRequest.model_validate(body | fields), "alice")

    async def roll_back(self, version: int | None, id: str = "rollback") -> ReleaseReply:
        return await self.service.roll_back(RollbackRequest(id=id, version=version), "alice")

    async def limit_training(self, version: int | None) -> None:
        """Set or remove the limit of training, as the server's route does."""
        request = TrainingLimitRequest(version=version)
        assert (await self.service.limit_training(request)).success
        self.loop.notify()

    async def stop(self) -> None:
        await self.loop.stop(self.task)
        self.journal.close()

    async def _connect(self, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)


class Parts:
    """A run whose backend has a rollout and a trainer as two engines."""

    def __init__(
        self, folder: Path, job: TrainJob = JOB, rollout: LocalRollout | None = None
    ) -> None:
        self.rollout = rollout or LocalRollout()
        self.trainer = LocalTrainer()
        sleeps = isinstance(rollout, SleepingRollout)
        backend = TwoProcesses(self.rollout, self.trainer, folder / "weights", sleeps=sleeps)
        self.run = Run(folder, backend, job)


def without_copies(reply: ReleasesReply) -> ReleasesReply:
    """Return a reply without the lists of copies: a restart makes another copy of the newest
    version."""
    return reply.model_copy(update={"released_copies": [], "newest_copies": []})
