"""Sample the held-out rows of an evaluation with the two versions that are compared. Rows that an
earlier process has sampled are read from the ledger instead."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fakevllm.ledger.records import EvaluatedRewards
from fakevllm.release.controller import ScoredPair
from fakevllm.release.held_out_draws import HeldOutDraws
from fakevllm_adapters.protocol.swarm import Task

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The rewards of one held-out row, which was answered several times."""

    rewards: Sequence[float]
    reason: str | None = None
    """Reason why the row has no rewards; None if it has rewards."""
    hook_hash: str | None = None
    """Content hash of the hooks that scored the row; None if the row was not scored."""
    version: int | None = None
    """Version that sampled the row; None if several versions may have sampled it."""


class HooksChanged(Exception):
    """Error for a row that hooks other than the evaluation's hooks have scored."""


class VersionChanged(Exception):
    """Error for a row that was not answered by the version that the evaluation needs."""


SampleRow = Callable[[Task, int | None, str], Awaitable[SampledRow]]
"""A function that samples a row with a version for an evaluation, stores the samples in the ledger,
and returns the row's rewards. The arguments are the row, the version (None for the served version),
and the evaluation's id. The function raises WireError if the row cannot be sampled now."""


async def _flushed() -> bool:
    return True  # without a ledger, there is nothing to write


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """The held-out rows of a proxy, and the functions that sample and read these rows."""

    tasks: Sequence[Task]
    sample: SampleRow
    read_evaluated: Callable[[str, str], list[EvaluatedRewards]]
    """Function that reads the rows of an evaluation from the ledger. The arguments are the
    evaluation's id and the content hash of its hooks. The function blocks its thread."""
    unload: Callable[[int], Awaitable[None]]
    """Function that unloads a version that no evaluation needs any more."""
    hook_hash: Callable[[], str] = lambda: ""
    """Function that returns the content hash of the hooks that score the rows."""
    check: Callable[[], str | None] = lambda: None
    """Function that checks whether the rows can measure versions. The function returns the reason
    if the rows cannot do this, for example because some of them were trained. Otherwise it returns
    None. The function blocks its thread."""
    flush: Callable[[], Awaitable[bool]] = _flushed
    """Function that waits until the ledger has all rows that were sampled. It returns False if the
    rows could not be written in time."""


class AnsweredRows:
    """The rewards of one version for the held-out rows that an evaluation draws. The ledger has the
    rewards of some rows. The other rows are sampled when their rewards are needed."""

    def __init__(
        self,
        draws: HeldOutDraws,
        tasks: Sequence[Task],
        sample: Callable[[Task], Awaitable[SampledRow]],
        known: Iterable[EvaluatedRewards],
        hook_hash: str = "",
    ) -> None:
        """Create the object. `sample` is a function that samples a row. `known` contains the rows
        whose rewards are in the ledger. `hook_hash` is the content hash of the hooks that score the
        rows."""
        self._draws = draws
        self._tasks = tasks
        self._sample = sample
        self._hook_hash = hook_hash
        self._answered: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
        """For each row, one list of rewards for each time that the row was sampled."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lock of each row, which is held while the row is sampled."""
        self.num_sampled = 0
        """Number of times that a row was sampled. Rows from the ledger do not count."""
        self.reason: str | None = None
        """Reason why the latest row without rewards has no rewards. None if there is no such
        row."""
        for row in known:
            self._answered[row.task_id].append(row.rewards)

    def num_known(self, most: int) -> int:
        """Return the number of draws before the first draw without known rewards. Count at most
        `most` draws."""
        for number in range(most):
            draw = self._draws.get(number)
            if len(self._answered[self._tasks[draw.row].task_id]) <= draw.occurrence:
                return number
        return most

    async def rewards(self, number: int) -> Sequence[float]:
        """Return the rewards of one draw. Each draw selects a held-out row, and may select the same
        row as an earlier draw. If the row was drawn more often than it was sampled, sample the row
        first. Raise WireError if the row cannot be sampled. Raise HooksChanged if hooks other than
        the evaluation's hooks scored the row."""
        draw = self._draws.get(number)
        task = self._tasks[draw.row]
        known = self._answered[task.task_id]
        async with self._locks[task.task_id]:
            while len(known) <= draw.occurrence:
                self.num_sampled += 1
                sampled = await self._sample(task)
                if sampled.hook_hash not in (None, self._hook_hash):
                    raise HooksChanged
                known.append(sampled.rewards)
                self.reason = sampled.reason or self.reason
        return known[draw.occurrence]


@dataclass(frozen=True, slots=True)
class EvaluationKey:
    """The two versions that an evaluation compares, and the evaluation's id."""

    eval_id: str
    """Id under which the ledger keeps the sampled rows."""
    released: int
    candidate: int


class HeldOutEvaluation:
    """The held-out rows that one evaluation has drawn. Each row has two lists of rewards: those of
    the released version, and those of the candidate (the version that may be released next)."""

    def __init__(self, key: EvaluationKey, released: AnsweredRows, candidate: AnsweredRows) -> None:
        self.key = key
        self._versions = (released, candidate)

    @property
    def reason(self) -> str | None:
        """Reason why a sampled row has no rewards. None if each sampled row has rewards."""
        return next((rows.reason for rows in self._versions if rows.reason is not None), None)

    @property
    def num_sampled(self) -> int:
        """Number of times that a row was sampled in this evaluation, counted for both compared
        versions together. Rows that were read from the ledger do not count."""
        return sum(rows.num_sampled for rows in self._versions)

    async def pairs(self, first: int, num: int = 1) -> list[ScoredPair]:
        """Return the rewards of both versions for `num` drawn rows. The draws are numbered, and
        `first` is the number of the first draw. Rows without known rewards are sampled first. Raise
        WireError if a row cannot be sampled. Raise HooksChanged if hooks other than the
        evaluation's hooks scored a row."""
        numbers = range(first, first + num)
        rewards = await at_once(
            [rows.rewards(number) for number in numbers for rows in self._versions]
        )
        return [ScoredPair(*rewards[at : at + 2]) for at in range(0, len(rewards), 2)]


async def at_once(calls: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run all calls at the same time, and return their results in the order of the calls. If a call
    raises an error, cancel the other calls, and raise the error."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
