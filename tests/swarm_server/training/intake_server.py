"""An intake without HTTP that can be restarted and killed, and the requests of its clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm_server.samples import call

from fakevllm_adapters.protocol.packed_numbers import pack_ids
from fakevllm_adapters.protocol.swarm import (
    AddDemonstrationRequest,
    AddLoggedGroupReply,
    AddLoggedGroupRequest,
    AddSampleRequest,
    DemonstrationIds,
    EndEpisodeRequest,
    EndGroupReply,
    EndGroupRequest,
    SiblingRef,
    WorkflowOutput,
)
from fakevllm_server.episodes.episode_registry import Episode
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.edit_demonstrations import parse_demonstrations
from tests.swarm_server.journal.server_process import JOB, ServerProcess

LIMIT_S = 1e6
CLIENT = "a client"


class IntakeServer:
    """One run directory and the server process that uses it."""

    def __init__(self, folder: Path) -> None:
        self.process = ServerProcess(folder)

    def restart(self, **settings: Any) -> None:
        """Restart the server with a job of these settings."""
        self.process = self.process.restarted(JOB.model_copy(update=settings))

    def kill_and_restart(self) -> None:
        """Kill the server, and start the next process on a copy of its files."""
        self.process = self.process.restarted_after_kill(self.process.folder / "next")

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons of the dropped groups, by group id, from the run log."""
        assert self.process.journal.drain()
        return {
            name: reason
            for entry in self.process.log.entries_after(0)
            for name, reason in entry.reasons.items()
        }

    @property
    def groups(self) -> dict[str, tuple[str, str | None]]:
        """State and reason of each group in the journal, by group id."""
        assert self.process.journal.drain()
        query = "SELECT group_id, state, reason FROM groups"
        rows = self.process.journal.read(lambda db: db.exec_driver_sql(query).all())
        return {name: (state, reason) for name, state, reason in rows}

    # --- requests of clients

    async def claim(self, kind: str = "train", limit_s: float = LIMIT_S) -> Episode:
        return await self.process.intake.claim(CLIENT, kind, limit_s)

    async def play(self, *calls: RecordedCall, kind: str = "train") -> Episode:
        """Claim an episode and record its calls, or one call if none are passed."""
        episode = await self.claim(kind)
        for recorded in calls or (call(),):
            await self.process.intake.add_episode_call(episode, recorded)
        return episode

    async def end(
        self, uuid: str, reward: float = 1.0, task: str = "t", closed: str | None = None
    ) -> None:
        await self.process.intake.end_episode(end_request(uuid, reward, task), reward, closed)

    async def capture(self, name: str, *calls: RecordedCall) -> None:
        """Record one call for each sibling of a group."""
        for index, recorded in enumerate(calls or (call(), call())):
            await self.process.intake.add_call(SiblingRef(name, index), recorded)

    async def end_group(
        self, name: str, *rewards: float, closed: str | None = None
    ) -> EndGroupReply:
        end = EndGroupRequest(group_id=name, rewards=list(rewards or (1.0, 0.0)))
        return await self.process.intake.end_group(end, closed)

    async def add_sample(
        self, name: str, advantage: float = 0.5, closed: str | None = None
    ) -> EndGroupReply:
        request = AddSampleRequest(
            sample_id=name, run_id="r", advantage=advantage, calls=[call().to_wire()]
        )
        return await self.process.intake.add_sample(request, [call()], closed)

    async def add_demonstration(
        self, name: str, response_ids: Sequence[int] = (7, 8)
    ) -> EndGroupReply:
        """Add a user's edit as a demonstration of `sft`."""
        ids = {"prompt_ids": pack_ids([1, 2]), "response_ids": pack_ids(response_ids)}
        edit = DemonstrationIds.model_validate({"kind": "plain", **ids})
        request = AddDemonstrationRequest(sample_id=name, run_id="r", demonstrations=[edit])
        loss, calls = parse_demonstrations(request)
        return await self.process.intake.add_demonstration(request, loss, calls, None)

    async def add_logged_group(self, name: str) -> AddLoggedGroupReply:
        """Add a group of an earlier run. Its calls have a version of this run, because the trainer
        of these tests computes no log-probabilities for importance weights."""
        calls = [[call()], [call()]]
        wire = [[one.to_wire() for one in own] for own in calls]
        request = AddLoggedGroupRequest(group_id=name, rewards=[1.0, 0.0], calls=wire)
        return await self.process.intake.add_logged_group(request, calls, None)


def end_request(uuid: str, reward: float = 1.0, task: str = "t") -> EndEpisodeRequest:
    return EndEpisodeRequest(
        client_uuid=CLIENT,
        episode_uuid=uuid,
        task_id=task,
        workflow_output=WorkflowOutput(reward=reward, metadata={"task_id": task}),
    )
