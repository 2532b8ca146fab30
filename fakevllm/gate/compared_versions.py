"""Open the held-out evaluations of the release gate: with two versions that the engine holds, or
with the served version and the reference. `release/between_steps` says what a reference is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from fakevllm.gate.held_out_evaluation import (
    AnsweredRows,
    EvaluationRows,
    HeldOutEvaluation,
    SampledRow,
    VersionChanged,
    at_once,
)
from fakevllm.release.held_out_draws import HeldOutDraws
from fakevllm_adapters.protocol.swarm import Task


async def open_beside_training(
    rows: EvaluationRows, eval_id: str, released: int, candidate: int
) -> HeldOutEvaluation:
    """Return an evaluation in which the engine samples both versions."""
    hooks = rows.hook_hash()
    known = await asyncio.to_thread(rows.read_evaluated, eval_id, hooks)
    draws = HeldOutDraws(eval_id, len(rows.tasks))

    def answered_by(version: int) -> AnsweredRows:
        async def sample(task: Task) -> SampledRow:
            return await rows.sample(task, version, eval_id)

        of_version = [row for row in known if row.version == version]
        return AnsweredRows(draws, rows.tasks, sample, of_version, hooks)

    return HeldOutEvaluation(eval_id, answered_by(released), answered_by(candidate))


class Reference:
    """The answers of the released version to drawn rows. Candidates answer the same rows."""

    def __init__(self, eval_id: str, rows: EvaluationRows) -> None:
        self.eval_id = eval_id
        self._rows = rows
        self._draws = HeldOutDraws(eval_id, len(rows.tasks))
        self._hooks = rows.hook_hash()
        self._answers: AnsweredRows | None = None

    async def read(self, copies: Callable[[], Collection[int]]) -> None:
        """Read the answers that the ledger has. `copies` returns the versions that have the
        released weights."""
        self._answers = await self._served(self.eval_id, copies)

    @property
    def answers(self) -> AnsweredRows:
        assert self._answers is not None, "a reference is read before it is used"
        return self._answers

    async def sample(self, first: int, num: int) -> list[bool]:
        """Sample draws from `first` on with the served version. Return for each draw whether it has
        rewards. Raises WireError, HooksChanged and VersionChanged."""
        numbers = range(first, first + num)
        return [bool(one) for one in await at_once([self.answers.rewards(n) for n in numbers])]

    async def open(self, eval_id: str, copies: Callable[[], Collection[int]]) -> HeldOutEvaluation:
        """Return an evaluation of the served version. `copies` returns the versions that have the
        candidate's weights."""
        return HeldOutEvaluation(eval_id, self.answers, await self._served(eval_id, copies))

    async def _served(self, eval_id: str, copies: Callable[[], Collection[int]]) -> AnsweredRows:
        """Return the rows that the served version answers while it is one of `copies`."""

        async def sample(task: Task) -> SampledRow:
            sampled = await self._rows.sample(task, None, eval_id)
            if sampled.version not in copies():
                raise VersionChanged
            return sampled

        known = await asyncio.to_thread(self._rows.read_evaluated, eval_id, self._hooks)
        of_copies = [row for row in known if row.version in copies()]
        return AnsweredRows(self._draws, self._rows.tasks, sample, of_copies, self._hooks)
