"""A run whose curves are written, and whose server can crash and restart."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from swarm_server.samples import call

from fakevllm_adapters.protocol.releases import GATE, Decision, ReleaseRecord
from fakevllm_adapters.protocol.swarm import EndEpisodeRequest, EndGroupRequest, SiblingRef
from fakevllm_server.curves.event_files import FOLDER
from fakevllm_server.curves.run_follower import Curves
from fakevllm_server.curves.trackers import TRACKERS
from fakevllm_server.journal.rows import ReleaseRow
from fakevllm_server.run.releases import Releases
from fakevllm_server.types.calls import VersionSpan
from tests.swarm_server.curves.readings import Charts
from tests.swarm_server.journal.server_process import ServerProcess

CLIENT = "client"
TENSORBOARD = TRACKERS["tensorboard"]


def open_curves(run_dir: Path) -> Curves:
    return Curves(run_dir, TENSORBOARD.open(run_dir))


def record_fake_model(run_dir: Path) -> None:
    model = {"backend": "fake", "model": None, "fingerprint": None}
    (run_dir / "model.json").write_text(json.dumps(model))


class Run:
    """A run with its curves, whose server can crash and restart."""

    def __init__(self, folder: Path, keep_calls_s: float = 0.0) -> None:
        self.folder = folder
        self.process = ServerProcess(folder, keep_calls_s=keep_calls_s)
        self.curves = open_curves(folder)

    async def train(self, *names: str, hooks: str = "") -> None:
        for name in names:
            for index in range(2):
                await self.process.intake.add_call(SiblingRef(name, index), call())
            end = EndGroupRequest(group_id=name, rewards=[1.0, 0.0], hook_hash=hooks)
            assert (await self.process.intake.end_group(end, None)).pooled
            assert await self.process.step()

    async def train_texts(
        self, name: str, prompt: str, answers: dict[str, float | None], reason: str | None = None
    ) -> None:
        """Train a group with these texts, as the fake engine would sample them: answers with their
        rewards. `reason` says why the last answer has no tokens."""
        record_fake_model(self.folder)
        for index, answer in enumerate(answers):
            is_redacted = reason is not None and index == len(answers) - 1
            ids = [] if is_redacted else [*answer.encode()]
            sampled = replace(
                call(untrainable=reason if is_redacted else None),
                prompt_ids=[] if is_redacted else [*prompt.encode()],
                response_ids=ids,
                logprobs=[-0.5] * len(ids),
                versions=[VersionSpan(0, 0, len(ids))],
            )
            await self.process.intake.add_call(SiblingRef(name, index), sampled)
        end = EndGroupRequest(group_id=name, rewards=[*answers.values()])
        assert (await self.process.intake.end_group(end, None)).pooled
        assert await self.process.step()

    async def evaluate(self, reward: float) -> None:
        claimed = await self.process.intake.claim(CLIENT, "eval", 60.0)
        end = EndEpisodeRequest(client_uuid=CLIENT, episode_uuid=claimed.uuid, task_id="t")
        await self.process.intake.end_episode(end, reward, None)

    async def crash(self) -> None:
        """Restart the server, which rolls back to the last checkpoint. No curves are written."""
        self.process = self.process.restarted()
        await self.process.boot_trainer()
        self.reopen_curves()

    def reopen_curves(self) -> None:
        self.curves.close()
        self.curves = open_curves(self.folder)

    async def decide(
        self, decision: Decision, version: int | None = None, restored: int | None = None
    ) -> None:
        """Record a decision of the release gate."""
        releases = Releases(self.process.journal, self.process.log)
        record = ReleaseRecord(
            number=releases.num_records + 1,
            id=f"decision {releases.num_records}",
            decision=decision,
            version=version,
            parent=None,
            time_s=time.time(),
            decided_by=GATE,
        )
        newest = self.process.log.version
        await releases.record(ReleaseRow(record, b"", newest, restored))

    async def catch_up(self) -> None:
        while await self.process.step():
            pass

    def chart(self, *, is_last: bool = False) -> int:
        assert self.process.journal.drain()
        return self.curves.catch_up(time.time(), is_last=is_last)

    @property
    def charts(self) -> Charts:
        return Charts(self.folder)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        name = "val/reward/mean"
        return self.charts.points(name) if name in self.charts.names else []

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / FOLDER).glob("events.out.tfevents.*"))


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises TimeoutError after a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
