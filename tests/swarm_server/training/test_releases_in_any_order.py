"""After any order of steps, crashes and decisions, the weights are those that the history says.

The weights of the engine are the list of the groups that trained them.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from crash.lineage_backend import Lineage, LineageBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.loops import JOB, Run, without_copies
from swarm_server.samples import call

from fakevllm_adapters.protocol.releases import Decision, ReleaseReply
from fakevllm_server.journal import reads
from fakevllm_server.training import checkpointing, loop, stop_and_restart

CANDIDATE, RELEASED, REJECTED, UNDECIDED, HOLD, RESUME = Decision
EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["stop", "crash", "newest"]), st.just(0)),
    st.tuples(st.sampled_from([CANDIDATE, RELEASED, REJECTED, "rollback"]), st.integers(0, 12)),
    st.tuples(st.sampled_from(["force"]), st.integers(1, 12)),
)


class History:
    """A run, and what is known about the weights of its versions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_groups = self._num_decisions = 0
        self._weights: dict[int, Lineage] = {0: []}
        """Weights of the versions that were seen."""
        self._is_forced = False
        self._run = self._start()

    def _start(self) -> Run[LineageBackend]:
        job = JOB.model_copy(update={"save_freq": 2, "max_staleness": 1000})
        return Run(self._folder, LineageBackend(), job)

    async def apply(self, kind: str, number: int) -> None:
        await self._run.rolling()
        version = min(number, self._run.log.version)
        match kind:
            case "train":
                for _ in range(number):
                    await self._train()
            case "stop" | "crash":
                await self._restart(is_crash=kind == "crash")
            case "newest":
                await self._decide(CANDIDATE, None)
            case "rollback":
                self._num_decisions += 1
                await self._check_return(
                    await self._run.roll_back(version, id=str(self._num_decisions))
                )
            case "force":
                was_rejected = version in self._run.releases.state.rejected
                reply = await self._decide(RELEASED, version, force=True)
                self._is_forced |= was_rejected and reply.success
            case _:
                await self._check_return(await self._decide(Decision(kind), version))
        await self._check()

    async def _train(self) -> None:
        self._num_groups += 1
        name = f"group {self._num_groups}"
        await self._run.rolling()
        version = self._run.engine.version
        siblings = [call(version, ids=(ord(letter), 6)) for letter in "yn"]
        await self._run.capture(name, *siblings)
        assert (await self._run.end_group(name, 1.0, 0.0)).pooled
        await self._run.trained(name)
        self._weights[self._run.engine.version] = list(self._run.backend.lineage)

    async def _decide(
        self, decision: Decision, version: int | None, *, force: bool = False
    ) -> ReleaseReply:
        self._num_decisions += 1
        return await self._run.decide(decision, version, id=str(self._num_decisions), force=force)

    async def _check_return(self, reply: ReleaseReply) -> None:
        if reply.record is None or "restored" not in reply.record.evidence:
            return
        await self._run.until(lambda: self._run.engine.version == self._run.log.version)
        await self._run.rolling()
        restored = reply.record.evidence["restored"]
        if restored in self._weights:
            assert self._run.backend.lineage == self._weights[restored]

    async def _restart(self, *, is_crash: bool) -> None:
        run, weights = self._run, list(self._run.backend.lineage)
        before, last_step = run.releases.reply(), run.log.last_step
        if is_crash:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
            run.journal.close()
        else:
            await run.stop()
        self._run = self._start()
        await self._run.until(lambda: self._run.log.last_step == last_step)
        await self._run.rolling()
        await self._run.until(lambda: self._run.backend.lineage == weights)
        assert without_copies(self._run.releases.reply()) == without_copies(before)
        assert self._run.releases.state == run.releases.state

    async def _check(self) -> None:
        run = self._run
        await run.rolling()
        await run.journal.flush()
        state = run.releases.state
        assert state.rejected.isdisjoint({0, state.released, state.candidate, run.engine.version})
        saved = run.journal.read(reads.checkpoints) + run.journal.read(reads.side_checkpoints)
        assert {state.released, state.candidate or 0} <= {0, *(one.version for one in saved)}
        self._weights.setdefault(run.engine.version, list(run.backend.lineage))
        steps = [step for step, _ in run.backend.lineage]
        assert steps == list(range(1, run.log.last_step + 1))
        trained = {calls[0][0]: step for step, calls in run.backend.lineage}
        assert len(trained) == len(steps), "a group was trained twice"
        if not self._is_forced:
            assert trained == run.trained_groups

    async def close(self) -> None:
        await self._run.stop()


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(EVENTS, max_size=14))
def test_the_weights_are_those_that_the_history_says_after_any_order_of_events(
    events: list[tuple[str, int]],
) -> None:
    async def play(folder: Path) -> None:
        history = History(folder)
        for kind, number in events:
            await history.apply(kind, number)
        await history.close()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(stop_and_restart, "FIRST_S", 0.0),
        mock.patch.object(loop, "SWEEP_EVERY_S", 0.01),
        mock.patch.object(checkpointing, "KEEP", 2),
    ):
        asyncio.run(play(Path(folder)))
