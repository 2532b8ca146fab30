"""Rollbacks to a checkpoint: steps are trained again, or their groups are reported as lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swarm_server.samples import call

from fakevllm_adapters.protocol.swarm import EndGroupRequest, SiblingRef
from fakevllm_server.journal import reads, retention
from fakevllm_server.training import checkpointing
from fakevllm_server.training import step as steps
from fakevllm_server.training.step import MAX_FAILURES
from fakevllm_server.types.backend import ActionFailed
from tests.swarm_server.journal.server_process import JOB, ServerProcess

SAVES_ALWAYS = JOB.model_copy(update={"save_freq": 1})


class Run:
    def __init__(self, folder: Path) -> None:
        self.process = ServerProcess(folder, SAVES_ALWAYS)

    async def train(self, *names: str, reward: float = 1.0) -> None:
        for name in names:
            await self.pool(name, reward)
            assert await self.process.step()

    async def pool(self, name: str, reward: float = 1.0) -> None:
        for index in range(2):
            await self.process.intake.add_call(SiblingRef(name, index), call())
        end = EndGroupRequest(group_id=name, rewards=[reward, 0.0])
        assert (await self.process.intake.end_group(end, None)).pooled

    async def lose_trainer(self, *damaged: int) -> None:
        """Lose the trainer, and damage the checkpoints of these steps."""
        for saved in self.process.journal.read(reads.checkpoints):
            if saved.step in damaged:
                folder = self.process.folder / "checkpoints" / saved.folder
                (folder / "weights.json").write_text("[]")
        await self.process.boot_trainer()

    async def catch_up(self) -> None:
        while await self.process.step():
            pass

    @property
    def trained(self) -> list[str]:
        """The ids of the groups that the weights were trained on, in order."""
        return [
            name
            for step in self.process.trainer.weights
            for name in dict.fromkeys(n for n, _ in step)
        ]

    @property
    def lost(self) -> list[str]:
        assert self.process.journal.drain()
        return [name for entry in self.process.log.entries_after(0) for name in entry.lost]


@pytest.fixture(params=[False, True], ids=["", "forgets"])
async def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    """A run, with the default retention or with a journal that deletes all rows it can."""
    if request.param:
        monkeypatch.setattr(retention, "KEEP_NEWEST", 0)
        monkeypatch.setattr(retention, "CHANGES_PER_ROUND", 1)
    monkeypatch.setattr(checkpointing, "KEEP", 2)
    opened = Run(tmp_path / "run")
    await opened.process.boot_trainer()
    yield opened
    opened.process.close()


async def test_no_group_is_lost_if_the_previous_checkpoint_can_be_read(
    run: Run,
) -> None:
    await run.train("a", "b", "c")
    await run.lose_trainer(3)
    await run.catch_up()
    assert (run.trained, run.lost) == (["a", "b", "c"], [])


async def test_groups_that_cannot_be_trained_again_are_lost_and_later_groups_are_not(
    run: Run,
) -> None:
    await run.train("best", reward=9.0)
    await run.train("b", "c", "d")
    await run.lose_trainer(3, 4)
    assert (run.trained, run.lost) == (["best"], ["b", "c", "d"])
    await run.train("e")
    await run.train("f")
    await run.lose_trainer(3)
    await run.catch_up()
    assert (run.trained, run.lost) == (["best", "e", "f"], ["b", "c", "d"])


async def test_deleted_calls_are_not_expected_after_a_rollback_to_an_older_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint is older than the deleted calls. It becomes one of the newest checkpoints
    when others are damaged."""
    monkeypatch.setattr(checkpointing, "KEEP", 3)
    await run.train("best", reward=9.0)
    await run.train("b", "c", "d", "e")
    await run.lose_trainer(4, 5)  # the checkpoint of step 3 and the best one are left
    assert await run.process.step()
    assert run.trained == ["best", "b", "c", "d"]
    await run.lose_trainer(3, 4)
    await run.catch_up()
    assert (run.trained, run.lost) == (["best"], ["b", "c", "d", "e"])


async def test_a_batch_that_cannot_be_trained_is_dropped_with_its_groups(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "RETRY_STEP_AFTER_S", 0.0)

    def fail() -> None:
        raise ActionFailed("it does not fit")

    run.process.trainer.before_step = fail
    await run.pool("a")
    for _ in range(MAX_FAILURES):
        assert not await run.process.step()
    run.process.trainer.before_step = lambda: None
    await run.train("b")
    assert run.trained == ["b"]
    assert run.process.log.last_step == 1


async def test_a_batch_whose_groups_were_all_dropped_is_not_trained(run: Run) -> None:
    """A kill between the drop of the groups and the deletion of the batch leaves this state."""
    await run.train("a")
    await run.pool("b")
    taken = run.process.intake.pool.take(run.process.engine.version)
    await run.process.log.record_plan(
        reads.PlannedBatch(2, run.process.engine.version, taken.groups)
    )
    run.process.log.record_drops(2, {"b": "step_failed"})
    run.process = run.process.restarted()
    await run.process.boot_trainer()
    await run.catch_up()
    assert run.trained == ["a"]
    await run.train("c")
    assert (run.trained, run.process.log.last_step) == (["a", "c"], 2)
