"""Prune captured calls (the recorded tokens of model calls): delete the calls of trained groups
that are too old, or that make the journal too large. A group is a request with its sampled answers.
The journal is the server's SQLite file. The calls are deleted in the same way as when a proxy asks
the server to forget the groups.

Three kinds of groups are never pruned: groups that wait for a training step, groups in planned
batches, and groups that a restart from the newest checkpoint would train again. The calls of older
steps are only needed if the newest checkpoint cannot be read. Those steps are then trained without
the pruned groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_server.journal import reads
from fakevllm_server.journal.forgotten_calls import TrainedCalls, trained_calls
from fakevllm_server.journal.store import Journal

log = logging.getLogger("fakevllm.server")

ROUND_EVERY_S = 60.0
"""Seconds between two rounds."""
GROUPS_PER_ROUND = 1000
"""Maximum number of groups that one round prunes."""
DAY_S = 86_400.0
BYTES_PER_MB = 1_000_000
SHARE_KEPT = 0.95
"""Share of `max_journal_mb` to which a journal that is too large is reduced, so that not every new
group causes a search for groups to prune."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules by which groups are chosen for pruning. Pruning a group deletes its captured calls
    (the recorded tokens of model calls).

    >>> group = TrainedCalls("g", trained_at=0.0, num_bytes=10)
    >>> CallRules(PrivacySettings(retention_days=1)).choose([group], 2 * DAY_S, 0)
    ['g']
    """

    settings: PrivacySettings

    @property
    def are_set(self) -> bool:
        """Whether the settings limit the age or the size of captured calls (the recorded tokens of
        model calls). Without such a limit, no calls are ever deleted."""
        settings = self.settings
        return settings.retention_days is not None or settings.max_journal_mb is not None

    def choose(self, groups: Iterable[TrainedCalls], now: float, num_bytes: int) -> list[str]:
        """Return the ids of the groups to prune. `groups` are the trained groups whose calls are
        still in the journal, oldest first. Groups that a restart would train again are not among
        them. `now` is the Unix time. `num_bytes` is the size of the journal's content."""
        chosen: list[str] = []
        excess = self._excess(num_bytes)
        for group in groups:
            if not (self._is_old(group, now) or excess > 0):
                break
            chosen.append(group.group_id)
            excess -= group.num_bytes
        return chosen

    def is_too_large(self, num_bytes: int) -> bool:
        """Return True if `num_bytes`, the size of the journal's content, exceeds the setting
        `max_journal_mb`. The journal is the server's SQLite file."""
        limit = self.settings.max_journal_mb
        return limit is not None and num_bytes > limit * BYTES_PER_MB

    def _is_old(self, group: TrainedCalls, now: float) -> bool:
        days = self.settings.retention_days
        return days is not None and group.trained_at < now - days * DAY_S

    def _excess(self, num_bytes: int) -> float:
        limit = self.settings.max_journal_mb
        if limit is None or not self.is_too_large(num_bytes):
            return 0.0
        return num_bytes - SHARE_KEPT * limit * BYTES_PER_MB


class CallRetention:
    """A task that deletes old captured calls (the recorded tokens of model calls) of the current
    run."""

    def __init__(
        self,
        settings: Callable[[], PrivacySettings],
        journal: Callable[[], Journal],
        forget: Callable[[Sequence[str]], Awaitable[object]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the task. `settings` and `journal` are functions that return the settings and the
        journal of the current run. `forget` deletes the calls of groups between two training
        steps."""
        self._settings = settings
        self._journal = journal
        self._forget = forget
        self._clock = clock
        self._trouble: str | None = None

    async def run(self) -> None:
        """Call `prune`, which deletes old captured calls, every ROUND_EVERY_S seconds until this
        task is cancelled."""
        while True:
            try:
                await self.prune()
            except Exception as error:  # isolates: the next round may succeed
                self._report(f"old calls cannot be pruned from the journal: {error or 'timeout'}")
            await asyncio.sleep(ROUND_EVERY_S)

    async def prune(self) -> int:
        """Delete the captured calls (the recorded tokens of model calls) of at most
        GROUPS_PER_ROUND groups. Return the number of groups whose calls were deleted."""
        rules = CallRules(self._settings())
        if not rules.are_set:
            return 0
        journal = self._journal()
        num_bytes = await asyncio.to_thread(journal.read, reads.num_bytes)
        groups = await asyncio.to_thread(journal.read, trained_calls, GROUPS_PER_ROUND)
        chosen = rules.choose(groups, self._clock(), num_bytes)
        if chosen:
            await self._forget(chosen)
            log.info("pruned the calls of %d trained groups from the journal", len(chosen))
        is_too_large = not chosen and rules.is_too_large(num_bytes)
        self._report(
            "the journal is larger than max_journal_mb, and has nothing more to prune"
            if is_too_large
            else None
        )
        return len(chosen)

    def _report(self, trouble: str | None) -> None:
        """Log `trouble` as a warning, unless the previous call reported the same trouble."""
        if trouble is not None and trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble
