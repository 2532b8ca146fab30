"""The background task that prunes old groups: it deletes their contents from the ledger, as
`fakevllm forget` does. A group is a request with the answers that were sampled for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from fakevllm.forgetting.forgetter import Forgetter
from fakevllm.forgetting.retention_rules import BYTES_PER_MB, Moment, RetentionRules
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.stored_groups import OLDEST, StoredGroup
from fakevllm.runtime.plurals import counted

log = logging.getLogger("fakevllm.forgetting")

GROUPS_PER_ROUND = 1000
"""Maximum number of groups that one round prunes. After each round, the ledger is searched once for
pieces that other groups share."""
PAUSE_S = 1.0
"""Seconds between two rounds while there is more to prune."""
ROUND_EVERY_S = 60.0
"""Seconds between two rounds otherwise."""
WHOLE_EVERY_S = 3600.0
"""Seconds after which a round begins at the oldest group again. Other rounds continue where the
last one ended, because the groups before are pruned or needed."""


@dataclass(frozen=True, slots=True)
class RetentionState:
    """The state of the background task that prunes old groups: what it has done since the proxy
    started."""

    num_pruned: int = 0
    last_at: float | None = None
    """Unix time of the last round that pruned a group; None if there was none."""
    trouble: str | None = None
    """Reason why the last round failed, or why the ledger stays too large; None if neither."""


class Retention:
    """The task that prunes old groups (requests with their answers) of one ledger until `run` is
    cancelled."""

    def __init__(
        self,
        rules: RetentionRules,
        ledger: Ledger,
        forgetter: Forgetter,
        open_evaluations: Callable[[], Collection[str]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the object. Pruning begins only when `run` is called. `open_evaluations` returns
        the ids of the evaluations that the release gate has not decided."""
        self.state = RetentionState()
        self._rules = rules
        self._ledger = ledger
        self._forgetter = forgetter
        self._open_evaluations = open_evaluations
        self._clock = clock
        self._place = OLDEST
        """Place in the ledger at which the next round begins."""
        self._whole_at = clock()
        """Time at which a round last began at the oldest group."""

    async def run(self) -> None:
        """Prune old groups until this task is cancelled. Also finish deletions that were
        interrupted, for example by the end of an earlier process."""
        while True:
            num_pruned = 0
            try:
                await self._forgetter.finish()
                num_pruned = await self.prune()
            except Exception as error:  # isolates: the next round may succeed
                self._place = OLDEST
                self._set_trouble(f"old groups cannot be pruned: {error}")
            await asyncio.sleep(PAUSE_S if num_pruned else ROUND_EVERY_S)

    async def prune(self) -> int:
        """Prune at most GROUPS_PER_ROUND groups, and return their number. Raises LedgerError if the
        ledger cannot be read or written."""
        if not self._rules.are_set:
            return 0
        now = self._clock()
        if abs(now - self._whole_at) >= WHOLE_EVERY_S:
            self._place, self._whole_at = OLDEST, now
        with self._ledger.reading():
            moment, chosen = await asyncio.to_thread(self._choose, now)
        if chosen:
            await self._forgetter.prune(chosen)
            self.state = replace(
                self.state, num_pruned=self.state.num_pruned + len(chosen), last_at=now
            )
            log.info(
                "pruned %s; the ledger had %.1f MB of content",
                counted(len(chosen), "old group"),
                moment.num_bytes / BYTES_PER_MB,
            )
        is_too_large = not chosen and self._rules.is_too_large(moment.num_bytes)
        self._set_trouble(
            "the ledger is larger than privacy.max_ledger_mb, and has nothing more to prune"
            if is_too_large
            else None
        )
        return len(chosen)

    def _choose(self, now: float) -> tuple[Moment, list[str]]:
        moment = Moment(now, self._ledger.num_bytes(), self._open_evaluations())
        return moment, self._rules.choose(self._groups(moment), moment, GROUPS_PER_ROUND)

    def _groups(self, moment: Moment) -> Iterator[StoredGroup]:
        for group in self._ledger.stored_groups.after(self._place):
            yield group
            self._place = group.place

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self.state.trouble:
            log.warning("%s", trouble)
        self.state = replace(self.state, trouble=trouble)
