"""The client that plays the script of the crash suite.

The client appends each acknowledgement to `client.jsonl` and flushes the file before it sends the
next request. After a crash, the client of the next server process reads the file and repeats only
the requests that were not acknowledged. The file therefore lists what a user has seen."""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.forgetting import ForgetGroupsRequest
from fakevllm_adapters.protocol.releases import Decision, ReleaseRequest, RollbackRequest
from fakevllm_adapters.protocol.swarm import (
    AddSampleRequest,
    CapturedCall,
    EndEpisodeRequest,
    EndGroupRequest,
    EngineStatus,
    SiblingRef,
)
from fakevllm_server.episodes.episode_registry import EpisodeRefused
from fakevllm_server.types.calls import RecordedCall, VersionSpan
from fakevllm_server.web.server_state import ServerState

Ack = dict[str, Any]
FILE = "client.jsonl"
NAME = "client"
IDLE_LIMIT_S = 60.0
HOUR = 3600.0
WAIT_LIMIT_S = 8.0
ENDED = ("consumed", "dropped")


def read_acks(run_dir: Path) -> dict[str, Ack]:
    """Return the acknowledgements in the client's file by name, in the order they arrived."""
    file = run_dir / FILE
    lines = file.read_text().splitlines() if file.exists() else []
    return {ack["name"]: ack for ack in map(json.loads, lines)}


class Client:
    """A client that calls the server's methods directly, in the server's own process."""

    def __init__(self, swarm: ServerState, run_dir: Path, async_steps: int = 0) -> None:
        """Create the client. With `async_steps`, each job has this setting, and the client waits
        for a group only when it is this number of groups ahead."""
        self._swarm = swarm
        self._async_steps = async_steps
        self._not_awaited: deque[str] = deque()
        """Ids of the ended groups for which the client has not waited yet, oldest first."""
        self._acks = read_acks(run_dir)
        self._file = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._acked = asyncio.Event()
        self._process_id = os.getpid()

    # --- requests

    async def start(self, name: str, job: TrainJob) -> None:
        async def do() -> Ack:
            async with self._swarm.engine_lock:
                if self._swarm.engine.status is EngineStatus.OFFLINE:
                    self._swarm.job = job.model_copy(update={"async_steps": self._async_steps})
                    await self._swarm.start_engine()
            await self._until(lambda: self._swarm.engine.status is EngineStatus.ROLLING)
            return {}

        await self._once(f"start {name}", do)

    async def stop(self, name: str) -> None:
        await self._wait_for_groups()

        async def do() -> Ack:
            await self._swarm.stop_engine()
            await self._swarm.journal.flush()
            return {}

        await self._once(f"stop {name}", do)

    async def group(self, name: str, *rewards: float) -> list[list[CapturedCall]]:
        """Capture and end a group, wait until it is trained or dropped, and return its calls."""
        for index in range(len(rewards)):
            await self.call(SiblingRef(name, index))
        request = EndGroupRequest(group_id=name, rewards=list(rewards))

        async def do() -> Ack:
            reply = await self._swarm.intake.end_group(request, self._swarm.closed_reason)
            assert reply.success or reply.failure_reason == "corrupt", reply.failure_reason
            self._swarm.notify_loop()
            complete = reply.with_prompts_per_call()
            return {"request": request.model_dump(), "reply": complete.model_dump()}

        ack = await self._once(f"end_group {name}", do)
        await self.until_ended(name)
        return [
            [CapturedCall.model_validate(call) for call in calls] for calls in ack["reply"]["calls"]
        ]

    async def sample(self, name: str, *calls: CapturedCall) -> None:
        run_id = self._swarm.run_id
        request = AddSampleRequest(sample_id=name, run_id=run_id, advantage=0.5, calls=list(calls))
        recorded = [RecordedCall.from_wire(call) for call in calls]

        async def do() -> Ack:
            closed_reason = self._swarm.closed_reason
            reply = await self._swarm.intake.add_sample(request, recorded, closed_reason)
            assert reply.success
            self._swarm.notify_loop()
            return {"request": request.model_dump(), "reply": reply.model_dump()}

        await self._once(f"add_sample {name}", do)
        await self.until_ended(name)

    async def decide(
        self, name: str, decision: Decision, version: int | None = None, *, force: bool = False
    ) -> Ack:
        """Make a decision about a version, and return its record."""
        await self._wait_for_groups()

        async def do() -> Ack:
            body = ReleaseRequest(id=name, decision=decision, version=version, force=force)
            reply = await self._swarm.release_service.decide(body, "")
            assert reply.record is not None, reply.failure_reason
            return {"record": reply.record.model_dump(mode="json")}

        return (await self._once(f"decide {name}", do))["record"]

    async def roll_back(self, name: str, version: int) -> None:
        await self._wait_for_groups()

        async def do() -> Ack:
            body = RollbackRequest(id=name, version=version)
            reply = await self._swarm.release_service.roll_back(body, "")
            assert reply.record is not None, reply.failure_reason
            return {"record": reply.record.model_dump(mode="json")}

        await self._once(f"decide {name}", do)

    async def end_group(self, name: str, *rewards: float) -> None:
        """End a group whose calls were sampled before, and wait until it is trained or dropped."""
        request = EndGroupRequest(group_id=name, rewards=list(rewards))

        async def do() -> Ack:
            reply = await self._swarm.intake.end_group(request, self._swarm.closed_reason)
            self._swarm.notify_loop()
            complete = reply.with_prompts_per_call()
            return {"request": request.model_dump(), "reply": complete.model_dump()}

        await self._once(f"end_group {name}", do)
        await self.until_ended(name)

    async def call(self, sibling: SiblingRef) -> None:
        async def do() -> Ack:
            call = self._new_call(sibling.episode_id)
            await self._swarm.intake.add_call(sibling, call)
            return {"group_id": sibling.group_id, "mark": call.prompt_ids[-1]}

        await self._once(f"call {sibling.episode_id}", do)

    async def abort_group(self, name: str) -> None:
        async def do() -> Ack:
            await self._swarm.intake.abort_group(name)
            return {"group_id": name}

        await self._once(f"abort_group {name}", do)

    async def forget(self, name: str) -> None:
        async def do() -> Ack:
            reply = await self._swarm.forget_service.forget(ForgetGroupsRequest(group_ids=[name]))
            assert reply.success, reply.failure_reason
            return {"group_id": name}

        await self._once(f"forget {name}", do)

    async def claim(self, name: str, kind: str = "train") -> str:
        """Claim an episode and return its uuid."""

        async def do() -> Ack:
            episode = await self._swarm.intake.claim(NAME, kind, IDLE_LIMIT_S)
            return {"uuid": episode.uuid, "key": episode.key}

        return (await self._once(f"claim {name}", do))["uuid"]

    async def episode(self, name: str, task: str, reward: float, kind: str = "train") -> None:
        uuid = await self.claim(name, kind)
        await self.episode_call(name, uuid)

        async def do() -> Ack:
            request = EndEpisodeRequest(client_uuid=NAME, episode_uuid=uuid, task_id=task)
            reply = await self._swarm.intake.end_episode(request, reward, self._swarm.closed_reason)
            self._swarm.notify_loop()
            return {"request": request.model_dump(), "reply": reply.model_dump(), "reward": reward}

        try:
            await self._once(f"end_episode {name}", do)
        except EpisodeRefused:
            await self.once(f"refused {name}", lambda: {"uuid": uuid})
            await self.episode(f"{name}, again", task, reward, kind)

    async def episode_call(self, name: str, uuid: str) -> None:
        async def do() -> Ack:
            episode = self._swarm.episodes.find(uuid)
            # The end may be in the journal although its acknowledgement was lost. Then it is too
            if episode is None:
                assert self._count("SELECT COUNT(*) FROM samples WHERE owner = ?", uuid)
                return {"uuid": uuid, "mark": None}
            call = self._new_call(uuid)
            await self._swarm.intake.add_episode_call(episode, call)
            return {"uuid": uuid, "mark": call.prompt_ids[-1]}

        await self._once(f"call of {name}", do)

    async def abort_episode(self, name: str) -> None:
        """Claim an episode, send one call, and abort the episode."""
        uuid = await self.claim(name)
        if f"abort_episode {name}" not in self._acks and self._swarm.episodes.find(uuid):
            await self.episode_call(name, uuid)

        async def do() -> Ack:
            await self._swarm.intake.abort_episode(uuid, NAME)
            return {"uuid": uuid}

        await self._once(f"abort_episode {name}", do)

    async def let_claim_expire(self, name: str) -> None:
        """Claim an episode, send one call, let the claim expire, and end it too late."""
        uuid = await self.claim(name)
        if f"sweep {name}" not in self._acks and self._swarm.episodes.find(uuid):
            await self.episode_call(name, uuid)

        async def sweep() -> Ack:
            await self._expire_claims(10 * HOUR)
            return {"uuid": uuid}

        async def end_late() -> Ack:
            request = EndEpisodeRequest(client_uuid=NAME, episode_uuid=uuid, task_id="late")
            try:
                await self._swarm.intake.end_episode(request, 1.0, self._swarm.closed_reason)
            except EpisodeRefused as refused:
                return {"uuid": uuid, "refused": refused.status}
            raise AssertionError("the end of an expired claim was accepted")

        swept = await self._once(f"sweep {name}", sweep)
        assert self._swarm.episodes.find(uuid) is None, "an expired claim is back"
        assert self._swarm.episodes.find_by_key(self._acks[f"claim {name}"]["key"]) is None, swept
        await self._once(f"late {name}", end_late)

    async def once(self, name: str, do: Callable[[], Ack]) -> None:
        """Run a synchronous action only once in the whole script. Record that the action is
        done."""

        async def run() -> Ack:
            return do()

        await self._once(name, run)

    # --- waiting

    @property
    def num_acks(self) -> int:
        return len(self._acks)

    async def wait_acknowledged(self, name: str) -> None:
        while name not in self._acks:
            self._acked.clear()
            await self._acked.wait()

    async def until_ended(self, group_id: str) -> None:
        """Wait until the group is trained or dropped and the training loop is idle. With
        `async_steps`, wait for an earlier group instead."""
        self._not_awaited.append(group_id)
        await self._wait_for_groups(self._async_steps)

    async def _wait_for_groups(self, num_ahead: int = 0) -> None:
        while len(self._not_awaited) > num_ahead:
            await self._wait_for_group(self._not_awaited.popleft())

    async def _wait_for_group(self, group_id: str) -> None:
        query = f"SELECT COUNT(*) FROM groups WHERE group_id = ? AND state IN {ENDED}"
        await self._until(lambda: self._count(query, group_id) == 1)

    async def until_task_ended(self, task: str, num_episodes: int) -> None:
        """Wait until the task's episodes are trained or dropped.

        Episodes that were lost or dropped are replaced, up to `num_episodes`.
        """
        await self._swarm.journal.flush()
        query = (
            "SELECT COUNT(*) FROM samples s LEFT JOIN groups g ON g.group_id = s.group_id "
            "WHERE s.task_id = ? AND g.reason IS NOT 'corrupt'"
        )
        for number in range(num_episodes - self._count(query, task)):
            await self.episode(f"{task} {number}, instead", task, 0.0)
        query = (
            "SELECT COUNT(*) FROM samples s LEFT JOIN groups g ON g.group_id = s.group_id "
            f"WHERE s.task_id = ? AND (g.state IS NULL OR g.state NOT IN {ENDED})"
        )
        await self._until(lambda: self._count(query, task) == 0)

    async def expire_unacknowledged_claims(self) -> None:
        """Renew the acknowledged claims, and let the others expire, since nobody will use them."""
        for name, ack in self._acks.items():
            episode = self._swarm.episodes.find(ack["uuid"]) if name.startswith("claim") else None
            if episode is not None:
                self._swarm.episodes.renew(episode, time.monotonic() + 2 * HOUR)
        await self._expire_claims(HOUR)

    async def _expire_claims(self, after_s: float) -> None:
        self._swarm.intake.sweep(time.monotonic() + after_s)
        await self._swarm.journal.flush()

    async def _until(self, condition: Callable[[], bool]) -> None:
        engine = self._swarm.engine
        async with asyncio.timeout(WAIT_LIMIT_S):
            await self._swarm.journal.flush()
            while not (condition() and self._is_idle):
                await engine.next_move()
                await self._swarm.journal.flush()  # drops are written after the step that made them

    @property
    def _is_idle(self) -> bool:
        # Without an engine nothing is trained, so OFFLINE counts as idle.
        idle = EngineStatus.ROLLING, EngineStatus.OFFLINE
        engine = self._swarm.engine
        return engine.status in idle and (self._async_steps > 0 or not engine.async_step_runs)

    def _count(self, query: str, *values: str) -> int:
        count = self._swarm.journal.read(lambda db: db.exec_driver_sql(query, values).scalar())
        assert isinstance(count, int)
        return count

    # --- the file of acknowledgements

    async def _once(self, name: str, do: Callable[[], Awaitable[Ack]]) -> Ack:
        """Return the recorded acknowledgement, or do the request and record its acknowledgement."""
        if name not in self._acks:
            ack = {"name": name, **await do()}
            os.write(self._file, json.dumps(ack).encode() + b"\n")
            os.fsync(self._file)
            self._acks[name] = ack
            self._acked.set()
        return self._acks[name]

    def _new_call(self, owner: str) -> RecordedCall:
        """Create a call with a mark of its own, because a repeated call would get another answer
        from a real engine."""
        mark = zlib.crc32(f"{owner} {self._process_id}".encode()) >> 1
        return RecordedCall(
            prompt_ids=[1, 2, mark],
            response_ids=[5, 6],
            logprobs=[-0.5, -0.5],
            versions=[VersionSpan(self._swarm.engine.version, 0, 2)],
            temperature=1.0,
            finish_reason="stop",
            untrainable=None,
        )
