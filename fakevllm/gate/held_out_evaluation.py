"""The held-out rows of an evaluation: sample them with the versions that are compared, and read
those that an earlier process has sampled."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fakevllm.ledger.records import EvaluatedRewards
from fakevllm.release.controller import ScoredPair
from fakevllm.release.held_out_draws import HeldOutDraws
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The rewards of a row that was sampled with one version."""

    rewards: Sequence[float]
    reason: str | None = None
    """Reason why there are no rewards; None if there are any."""
    hook_hash: str | None = None
    """Content hash of the hooks that scored the row; None if none did."""
    version: int | None = None
    """Version that sampled the row; None if several may have."""


class HooksChanged(Exception):
    """Error for a row that was scored by other hooks than those of its evaluation."""


class VersionChanged(Exception):
    """Error for a row that another version sampled than the evaluation needs."""


SampleRow = Callable[[Task, int | None, str], Awaitable[SampledRow]]
"""A function that samples a row with a version for an evaluation, stores it in the ledger, and
returns its rewards. The arguments are the row, the version (None: the one that is served), and the
evaluation's id. It raises WireError if the row cannot be sampled now."""


async def _flushed() -> bool:
    """Say that there is nothing to write."""
    return True


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """The held-out rows of a proxy, and the functions that sample and read them."""

    tasks: Sequence[Task]
    sample: SampleRow
    read_evaluated: Callable[[str, str], list[EvaluatedRewards]]
    """Function that reads the rows of an evaluation from the ledger. The arguments are the
    evaluation's id and the content hash of its hooks. It blocks the thread."""
    unload: Callable[[int], Awaitable[None]]
    """Function that is called with a version that no evaluation needs any more."""
    hook_hash: Callable[[], str] = lambda: ""
    """Function that returns the content hash of the hooks that score the rows."""
    check: Callable[[], str | None] = lambda: None
    """Function that returns the reason if the rows measure nothing. It blocks the thread."""
    flush: Callable[[], Awaitable[bool]] = _flushed
    """Function that waits until the ledger has all rows that were sampled. It returns False if they
    could not be written in time."""


class AnsweredRows:
    """The rewards of one version for drawn rows: those that the ledger has, and those that are
    sampled."""

    def __init__(
        self,
        draws: HeldOutDraws,
        tasks: Sequence[Task],
        sample: Callable[[Task], Awaitable[SampledRow]],
        known: Iterable[EvaluatedRewards],
        hook_hash: str = "",
    ) -> None:
        """Create the rows. `sample` samples a row, `known` are the rows that the ledger has, and
        `hook_hash` is the content hash of the hooks that score the others."""
        self._draws = draws
        self._tasks = tasks
        self._sample = sample
        self._hook_hash = hook_hash
        self._answered: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
        """By row, the rewards of each time that the row was sampled."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lock of each row, which is held while the row is sampled."""
        self.num_sampled = 0
        """Number of rows that were sampled, and not read from the ledger."""
        self.reason: str | None = None
        """Reason why the row that was sampled last without rewards has none."""
        for row in known:
            self._answered[row.task_id].append(row.rewards)

    def num_known(self, most: int) -> int:
        """Return how many draws are known, from the first one on, but not more than `most`."""
        for number in range(most):
            draw = self._draws.get(number)
            if len(self._answered[self._tasks[draw.row].task_id]) <= draw.occurrence:
                return number
        return most

    async def rewards(self, number: int) -> Sequence[float]:
        """Return the rewards of a draw, after its row was sampled as often as it was drawn. Raises
        WireError if it cannot be sampled, and HooksChanged if other hooks scored it."""
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
    """What an evaluation is about."""

    eval_id: str
    """Id under which the ledger keeps the sampled rows."""
    released: int
    candidate: int


class HeldOutEvaluation:
    """The drawn rows of one evaluation, answered by two versions."""

    def __init__(self, key: EvaluationKey, released: AnsweredRows, candidate: AnsweredRows) -> None:
        self.key = key
        self._versions = (released, candidate)

    @property
    def reason(self) -> str | None:
        """Reason why a row that was sampled without rewards has none."""
        return next((rows.reason for rows in self._versions if rows.reason is not None), None)

    @property
    def num_sampled(self) -> int:
        """Number of rows that were sampled, and not read from the ledger."""
        return sum(rows.num_sampled for rows in self._versions)

    async def pairs(self, first: int, num: int = 1) -> list[ScoredPair]:
        """Return the rewards of the draws from `first` on, after their rows were sampled by the
        versions that lack them. Raises WireError if one cannot be sampled, and HooksChanged if
        other hooks scored it."""
        numbers = range(first, first + num)
        rewards = await at_once(
            [rows.rewards(number) for number in numbers for rows in self._versions]
        )
        return [ScoredPair(*rewards[at : at + 2]) for at in range(0, len(rewards), 2)]


async def at_once(
    draws: Sequence[Coroutine[Any, Any, Sequence[float]]],
) -> list[Sequence[float]]:
    """Return the rewards of draws that are sampled at the same time. If one raises an error, cancel
    the others, and raise it."""
    tasks = [asyncio.create_task(draw) for draw in draws]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
