"""Sample the held-out rows of an evaluation with two versions, and read those that were sampled by
an earlier process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

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


class HooksChanged(Exception):
    """Error for a row that was scored by other hooks than those of its evaluation."""


SampleRow = Callable[[Task, int, str], Awaitable[SampledRow]]
"""A function that samples a row with a version for an evaluation, stores it in the ledger, and
returns its rewards. The arguments are the row, the version, and the evaluation's id. It raises
WireError if the row cannot be sampled now."""


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


class HeldOutEvaluation:
    """The rows of one evaluation: those that the ledger has, and those that are sampled."""

    def __init__(
        self,
        eval_id: str,
        rows: EvaluationRows,
        known: Sequence[EvaluatedRewards],
        hook_hash: str = "",
    ) -> None:
        """Create the evaluation. `known` are the rows that the ledger has, and `hook_hash` is the
        content hash of the hooks that score the others."""
        self.eval_id = eval_id
        self._rows = rows
        self._hook_hash = hook_hash
        self._draws = HeldOutDraws(eval_id, len(rows.tasks))
        self._sampled: defaultdict[tuple[int, str], list[Sequence[float]]] = defaultdict(list)
        """By version and row, the rewards of each time that the row was sampled."""
        self.reason: str | None = None
        """Reason why the row that was sampled last without rewards has none."""
        self.was_sampled = False
        """Whether the draw that was returned last had to be sampled."""
        for row in known:
            self._sampled[row.version, row.task_id].append(row.rewards)

    async def pair(self, number: int, released: int, candidate: int) -> ScoredPair:
        """Return the rewards of a draw, after the row was sampled by the versions that lack it.
        Raises WireError if it cannot be sampled, and HooksChanged if other hooks scored it."""
        self.was_sampled = False
        draw = self._draws.get(number)
        task = self._rows.tasks[draw.row]
        parts = [
            asyncio.create_task(self._rewards(version, task, draw.occurrence))
            for version in (released, candidate)
        ]
        try:
            return ScoredPair(*await asyncio.gather(*parts))
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _rewards(self, version: int, task: Task, occurrence: int) -> Sequence[float]:
        known = self._sampled[version, task.task_id]
        while len(known) <= occurrence:
            self.was_sampled = True
            sampled = await self._rows.sample(task, version, self.eval_id)
            if sampled.hook_hash not in (None, self._hook_hash):
                raise HooksChanged
            known.append(sampled.rewards)
            self.reason = sampled.reason or self.reason
        return known[occurrence]
