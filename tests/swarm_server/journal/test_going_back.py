"""A trainer that goes back: what is made again, what cannot be, and what nobody takes."""

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
from tests.swarm_server.journal.lives import JOB, Life

SAVES_ALWAYS = JOB.model_copy(update={"save_freq": 1})


class Run:
    def __init__(self, folder: Path) -> None:
        self.life = Life(folder, SAVES_ALWAYS)

    async def train(self, *names: str, reward: float = 1.0) -> None:
        for name in names:
            await self.pool(name, reward)
            assert await self.life.step()

    async def pool(self, name: str, reward: float = 1.0) -> None:
        for index in range(2):
            await self.life.intake.add_call(SiblingRef(name, index), call())
        end = EndGroupRequest(group_id=name, rewards=[reward, 0.0])
        assert (await self.life.intake.end_group(end, None)).pooled

    async def lose_trainer(self, *damaged: int) -> None:
        """The checkpoints of these steps cannot be read any more."""
        for saved in self.life.journal.read(reads.checkpoints):
            if saved.step in damaged:
                folder = self.life.folder / "checkpoints" / saved.folder
                (folder / "weights.json").write_text("[]")
        await self.life.boot_trainer()

    async def catch_up(self) -> None:
        while await self.life.step():
            pass

    @property
    def trained(self) -> list[str]:
        """What the weights are made of, in order."""
        return [
            name for step in self.life.trainer.weights for name in dict.fromkeys(n for n, _ in step)
        ]

    @property
    def lost(self) -> list[str]:
        assert self.life.journal.drain()
        return [name for entry in self.life.log.entries_after(0) for name in entry.lost]


@pytest.fixture(params=[False, True], ids=["", "forgets"])
async def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    """Also where nothing is kept that can be forgotten."""
    if request.param:
        monkeypatch.setattr(retention, "KEEP_NEWEST", 0)
        monkeypatch.setattr(retention, "CHANGES_PER_ROUND", 1)
    monkeypatch.setattr(checkpointing, "KEEP", 2)
    found = Run(tmp_path / "run")
    await found.life.boot_trainer()
    yield found
    found.life.close()


async def test_a_checkpoint_that_is_damaged_costs_nothing_while_the_one_before_is_whole(
    run: Run,
) -> None:
    await run.train("a", "b", "c")
    await run.lose_trainer(3)
    await run.catch_up()
    assert (run.trained, run.lost) == (["a", "b", "c"], [])


async def test_what_cannot_be_made_again_is_told_as_lost_and_what_comes_then_is_not(
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


async def test_calls_that_were_let_go_are_gone_whichever_checkpoints_come_then(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one is older than what was let go: it is among the newest where others are
    damaged."""
    monkeypatch.setattr(checkpointing, "KEEP", 3)
    await run.train("best", reward=9.0)
    await run.train("b", "c", "d", "e")
    await run.lose_trainer(4, 5)  # 3 and the best are left
    assert await run.life.step()
    assert run.trained == ["best", "b", "c", "d"]
    await run.lose_trainer(3, 4)
    await run.catch_up()
    assert (run.trained, run.lost) == (["best"], ["b", "c", "d", "e"])


async def test_a_batch_that_nobody_takes_is_gone_with_its_groups(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "RETRY_STEP_AFTER_S", 0.0)

    def fail() -> None:
        raise ActionFailed("it does not fit")

    run.life.trainer.before = fail
    await run.pool("a")
    for _ in range(MAX_FAILURES):
        assert not await run.life.step()
    run.life.trainer.before = lambda: None
    await run.train("b")
    assert run.trained == ["b"]
    assert run.life.log.last_step == 1


async def test_a_batch_whose_groups_are_all_gone_is_not_trained(run: Run) -> None:
    """As a kill leaves it between the drop of its groups and the end of its batch."""
    await run.train("a")
    await run.pool("b")
    taken = run.life.intake.pool.take(run.life.engine.version)
    await run.life.log.record_plan(reads.PlannedBatch(2, run.life.engine.version, taken.groups))
    run.life.log.record_drops(2, {"b": "step_failed"})
    run.life = run.life.next()
    await run.life.boot_trainer()
    await run.catch_up()
    assert run.trained == ["a"]
    await run.train("c")
    assert (run.trained, run.life.log.last_step) == (["a", "c"], 2)
