"""What clients do to an intake, in one life of a server after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm_server.samples import call

from fakevllm_adapters.protocol.swarm import (
    AddSampleRequest,
    EndEpisodeRequest,
    EndGroupReply,
    EndGroupRequest,
    SiblingRef,
    WorkflowOutput,
)
from fakevllm_server.episodes.registry import Episode
from fakevllm_server.types.calls import RecordedCall
from tests.swarm_server.journal.lives import JOB, Life

LIMIT_S = 1e6
CLIENT = "a client"


class Lives:
    """One life after the other, on one run directory."""

    def __init__(self, folder: Path) -> None:
        self.now = Life(folder)

    def next(self, **settings: Any) -> None:
        self.now = self.now.next(JOB.model_copy(update=settings))

    def kill(self) -> None:
        self.now = self.now.killed(self.now.folder / "next")

    @property
    def reasons(self) -> dict[str, str]:
        """Of the groups that were dropped, as proxies are told."""
        assert self.now.journal.drain()
        return {
            name: why for one in self.now.log.entries_after(0) for name, why in one.reasons.items()
        }

    @property
    def groups(self) -> dict[str, tuple[str, str | None]]:
        """State and reason."""
        assert self.now.journal.drain()
        query = "SELECT group_id, state, reason FROM groups"
        found = self.now.journal.read(lambda db: db.exec_driver_sql(query).all())
        return {name: (state, reason) for name, state, reason in found}

    # --- what clients do

    async def claimed(self, kind: str = "train", limit_s: float = LIMIT_S) -> Episode:
        return await self.now.intake.claim(CLIENT, kind, limit_s)

    async def played(self, *calls: RecordedCall, kind: str = "train") -> Episode:
        episode = await self.claimed(kind)
        for one in calls or (call(),):
            await self.now.intake.add_episode_call(episode, one)
        return episode

    async def end(
        self, uuid: str, reward: float = 1.0, task: str = "t", closed: str | None = None
    ) -> None:
        await self.now.intake.end_episode(end_of(uuid, reward, task), reward, closed)

    async def captured(self, name: str, *calls: RecordedCall) -> None:
        for index, one in enumerate(calls or (call(), call())):
            await self.now.intake.add_call(SiblingRef(name, index), one)

    async def end_group(
        self, name: str, *rewards: float, closed: str | None = None
    ) -> EndGroupReply:
        end = EndGroupRequest(group_id=name, rewards=list(rewards or (1.0, 0.0)))
        return await self.now.intake.end_group(end, closed)

    async def add_sample(
        self, name: str, advantage: float = 0.5, closed: str | None = None
    ) -> EndGroupReply:
        told = AddSampleRequest(
            sample_id=name, run_id="r", advantage=advantage, calls=[call().to_wire()]
        )
        return await self.now.intake.add_sample(told, [call()], closed)


def end_of(uuid: str, reward: float = 1.0, task: str = "t") -> EndEpisodeRequest:
    return EndEpisodeRequest(
        client_uuid=CLIENT,
        episode_uuid=uuid,
        task_id=task,
        workflow_output=WorkflowOutput(reward=reward, metadata={"task_id": task}),
    )
