"""Open the held-out evaluations of the release gate, which decides whether new weights may answer
apps. An evaluation compares two versions of the weights on held-out rows: the released version, and
a candidate that may be released next.

An engine that can hold several versions samples both versions. An engine that holds one set of
weights samples only the candidate, which is then the served version. In this case, the candidate is
compared with the reference: earlier answers of the released version to the same rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from fakevllm.gate.held_out_evaluation import (
    AnsweredRows,
    EvaluationKey,
    EvaluationRows,
    HeldOutEvaluation,
    SampledRow,
    VersionChanged,
    at_once,
)
from fakevllm.hooks.results import hook_reason
from fakevllm.release.held_out_draws import HeldOutDraws
from fakevllm_adapters.protocol.swarm import Task

NUM_TRIES = 3
"""Maximum number of times that a candidate answers a row whose answers the hook could not score.
The row is answered again because the hook may have failed for a temporary reason, such as an outage
of a judge that the hook calls. If only the candidate lacks a reward for a row after all tries, the
lowest possible reward counts for the candidate."""


async def open_beside_training(rows: EvaluationRows, key: EvaluationKey) -> HeldOutEvaluation:
    """Return an evaluation that compares the released version with the candidate (a version that
    may be released next). The engine samples with the two versions while training goes on."""
    eval_id, hooks = key.eval_id, rows.hook_hash()
    known = await asyncio.to_thread(rows.read_evaluated, eval_id, hooks)
    draws = HeldOutDraws(eval_id, len(rows.tasks))

    def answered_by(version: int) -> AnsweredRows:
        async def sample(task: Task) -> SampledRow:
            return await rows.sample(task, version, eval_id)

        of_version = [row for row in known if row.version == version]
        return AnsweredRows(draws, rows.tasks, sample, of_version, hooks)

    return HeldOutEvaluation(key, answered_by(key.released), answered_by(key.candidate))


class Reference:
    """The reference: the released version's answers to the held-out rows that are drawn. Each
    candidate (a version that may be released next) later answers the same rows, so that the rewards
    can be compared row by row."""

    def __init__(self, eval_id: str, rows: EvaluationRows, retry_every_s: float) -> None:
        """Create the reference without its answers, which `read` adds. A candidate is a version
        that may be released next. If the hook cannot score a candidate's answers to a row, the
        candidate answers this row again after `retry_every_s` seconds."""
        self.eval_id = eval_id
        self._rows = rows
        self._retry_every_s = retry_every_s
        self._draws = HeldOutDraws(eval_id, len(rows.tasks))
        self._hooks = rows.hook_hash()
        self._answers: AnsweredRows | None = None

    async def read(self, copies: Callable[[], Collection[int]]) -> None:
        """Read the reference's answers from the ledger. `copies` is a function that returns all
        versions whose weights are equal to the released weights. Call this method before any other
        method."""
        self._answers = await self._served(self.eval_id, copies)

    @property
    def answers(self) -> AnsweredRows:
        assert self._answers is not None, "a reference is read before it is used"
        return self._answers

    async def sample(self, first: int, num: int) -> list[Sequence[float]]:
        """Sample `num` drawn rows with the served version, and return the rewards of each row. The
        draws are numbered, and `first` is the number of the first draw to sample.

        Raise WireError if a row cannot be sampled. Raise HooksChanged if the hooks have changed.
        Raise VersionChanged if the served version no longer has the released weights.
        """
        numbers = range(first, first + num)
        return await at_once([self.answers.rewards(number) for number in numbers])

    async def open(
        self, key: EvaluationKey, copies: Callable[[], Collection[int]]
    ) -> HeldOutEvaluation:
        """Return an evaluation that compares the served version with the reference (the answers of
        the released version to the same rows). `copies` is a function that returns all versions
        whose weights are equal to the candidate's weights. The served version must be one of these
        versions."""
        candidate = await self._served(key.eval_id, copies, NUM_TRIES)
        return HeldOutEvaluation(key, self.answers, candidate)

    async def _served(
        self, eval_id: str, copies: Callable[[], Collection[int]], num_tries: int = 1
    ) -> AnsweredRows:
        """Return the rows of the evaluation `eval_id`. The served version answers these rows.
        `copies` is a function that returns the versions whose weights are evaluated. If another
        version answers a row, the sampling of this row raises VersionChanged. If the hook cannot
        score the answers to a row, the row is sampled again, up to `num_tries` times in all."""

        async def sample_once(task: Task) -> SampledRow:
            sampled = await self._rows.sample(task, None, eval_id)
            if sampled.version not in copies():
                raise VersionChanged
            return sampled

        async def sample(task: Task) -> SampledRow:
            sampled = await sample_once(task)
            for _ in range(num_tries - 1):
                if sampled.rewards or hook_reason(sampled.reason) is None:
                    break
                await asyncio.sleep(self._retry_every_s)
                sampled = await sample_once(task)
            return sampled

        known = await asyncio.to_thread(self._rows.read_evaluated, eval_id, self._hooks)
        is_final = num_tries == 1  # else a try without rewards in the ledger does not count
        of_copies = [row for row in known if row.version in copies() and (row.rewards or is_final)]
        return AnsweredRows(self._draws, self._rows.tasks, sample, of_copies, self._hooks)
