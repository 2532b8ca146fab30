"""HookReloader, which replaces the hooks of a running proxy with edited ones.

The new hooks are loaded in a process of their own, and tried on requests and answers in the ledger
(the proxy's database). They take over only if the limits of `[hooks.reload]` allow it. Apps do not
notice the trial, even if the new hooks fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fakevllm.errors import HookError, UserError
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.hook_versions import MAX_OPEN, HookVersions
from fakevllm.hooks.loader import first_line
from fakevllm.rescoring.change_lines import change_lines
from fakevllm.rescoring.hook_trial import HookTrial, Trial
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.terminal_text import printable

log = logging.getLogger("fakevllm.hooks")


class ReloadsStopped(Exception):
    """The proxy is stopping, so the hooks are not reloaded."""


class ReloadState(Enum):
    """The way in which a reload of the hooks (the user's functions, such as the reward) ended."""

    TAKEN_OVER = "taken_over"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    POSTPONED = "postponed"
    """The new hooks were not tried, for a temporary reason."""


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """The result of one reload of the hooks, with a message and figures about the new rewards."""

    state: ReloadState
    message: str
    """One line with the result of the reload and the reason for this result."""
    changes: list[str] = field(default_factory=list[str])
    """Lines that compare the new rewards with the old ones; empty if no group was tried."""
    figures: dict[str, Any] | None = None
    """All figures of the comparison of the new rewards with the old ones. None if no group was
    tried."""
    at: float = 0.0
    """Unix time at which the reload ended."""
    digest: str | None = None
    """Digest of the files that the reload read; None if they cannot be read."""


class HookReloader:
    """Reloads the hooks of one proxy. If several reloads are requested, they run one after the
    other."""

    def __init__(
        self,
        versions: HookVersions,
        new_worker: Callable[[], HookWorker],
        trial: HookTrial,
        max_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the reloader. `new_worker` returns a hook process for the hook files on disk. This
        process is not started yet. `max_s` is the maximum number of seconds for loading and trying
        new hooks. `clock` returns the Unix time."""
        self._versions = versions
        self._new_worker = new_worker
        self._trial = trial
        self._max_s = max_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[ReloadOutcome]] = set()
        self._is_stopped = False
        self.last: ReloadOutcome | None = None
        """Outcome of the last reload that found edited files; None if no reload has found any."""

    async def reload(self) -> ReloadOutcome:
        """Load the hook files from disk, and try the new hooks on groups of the ledger (requests
        with their sampled answers). The new hooks replace the old hooks if the limits of
        `[hooks.reload]` allow it. If the caller is cancelled, the reload still goes on. Raises
        ReloadsStopped if the proxy is stopping."""
        if self._is_stopped:
            raise ReloadsStopped
        task = asyncio.create_task(self._reload())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._is_stopped and task.cancelled():
                raise ReloadsStopped from None
            raise

    async def reload_edited(self) -> str | None:
        """Run `reload` after the hook files were edited. Return the digest of the files that were
        read. Return None if the reload must be repeated later."""
        try:
            outcome = await self.reload()
        except ReloadsStopped:
            return None
        return None if outcome.state is ReloadState.POSTPONED else outcome.digest

    def stop(self) -> None:
        """Cancel all running reloads of the hooks, and begin no further reload."""
        self._is_stopped = True
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        """Cancel all reloads of the hooks, and wait until the reloads have ended."""
        self.stop()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _reload(self) -> ReloadOutcome:
        async with self._lock:
            try:
                outcome = await self._attempt()
            except Exception as error:  # isolates: a reload never ends with an error
                old = self._versions.info.content_hash
                outcome = self._refused("The new hooks", old, first_line(error))
            if outcome.state is not ReloadState.UNCHANGED:
                self._log(outcome)
                self.last = outcome
            return outcome

    async def _attempt(self) -> ReloadOutcome:
        worker = self._new_worker()
        try:
            return await self._try(worker)
        finally:
            if self._versions.current is not worker:
                await worker.close()

    async def _try(self, worker: HookWorker) -> ReloadOutcome:
        """Load and try new hooks, and let them take over if the limits of `[hooks.reload]` allow
        it."""
        old = self._versions.info.content_hash
        try:
            new = await worker.read_files()
        except HookError as error:
            return self._refused("The new hooks", old, str(error))
        name = f"The new hooks {new}"
        if new == old:
            message = f"The hook files did not change, and the hooks {old} stay in use."
            return ReloadOutcome(ReloadState.UNCHANGED, message, at=self._clock(), digest=new)
        if self._versions.num_open >= MAX_OPEN:
            reason = (
                f"{MAX_OPEN - 1} older versions of the hooks still have groups to score; try again "
                "when these groups are done"
            )
            return self._refused(name, old, reason, new, ReloadState.POSTPONED)
        trial, reason = Trial(), None
        is_loaded = False
        try:
            async with asyncio.timeout(self._max_s):
                await worker.start()
                is_loaded = True
                reason = await self._trial.run(worker, trial)
        except TimeoutError:
            reason = self._timeout_reason(trial, is_loaded)
        except (HookError, UserError) as error:
            reason = str(error).rstrip(".")
        except OSError as error:  # translates: there may be no memory for another process
            reason = f"their process could not be started ({error})"
        except Exception as error:  # isolates: whatever fails in a trial refuses the new hooks
            reason = f"the trial failed with {first_line(error)}"
        if reason is not None:
            return self._refused(name, old, reason, new, trial=trial)
        message = f"{name} took over from {old}: {_tried(trial)}."
        outcome = self._outcome(ReloadState.TAKEN_OVER, message, trial, new)
        self._versions.take_over(worker, outcome.at)
        return outcome

    def _timeout_reason(self, trial: Trial, is_loaded: bool) -> str:
        limit = f"{self._max_s:g} s (limit hooks.reload.max_s)"
        if not is_loaded:
            return f"loading them took longer than {limit}"
        num = trial.comparison.num_groups + trial.num_skipped
        return f"only {num} of {counted(trial.num_groups, 'group')} were tried within {limit}"

    def _refused(
        self,
        name: str,
        old: str,
        reason: str,
        digest: str | None = None,
        state: ReloadState = ReloadState.REFUSED,
        trial: Trial | None = None,
    ) -> ReloadOutcome:
        message = f"{name} were not taken over, and the hooks {old} stay in use: {reason}."
        return self._outcome(state, message, trial or Trial(), digest)

    def _outcome(
        self, state: ReloadState, message: str, trial: Trial, digest: str | None
    ) -> ReloadOutcome:
        comparison = trial.comparison
        return ReloadOutcome(
            state,
            printable(message),
            change_lines(comparison) if comparison.num_compared else [],
            comparison.as_json() if comparison.num_groups else None,
            self._clock(),
            digest,
        )

    def _log(self, outcome: ReloadOutcome) -> None:
        if self.last is not None and _same_verdict(self.last, outcome):
            return
        is_clean = outcome.state is ReloadState.TAKEN_OVER
        lines = [outcome.message, *(f"  {line}" for line in outcome.changes if is_clean)]
        for line in lines:
            log.log(logging.INFO if is_clean else logging.WARNING, "%s", line)


def _same_verdict(first: ReloadOutcome, second: ReloadOutcome) -> bool:
    """Return True if both reloads had the same result for the same files. The messages of the two
    reloads may still differ. A message names the first group that failed, and the groups of a trial
    end in any order."""
    files = [one.digest or one.message for one in (first, second)]
    return first.state is second.state and files[0] == files[1]


def _tried(trial: Trial) -> str:
    """Return a text that says on how many groups new hooks were tried."""
    comparison = trial.comparison
    text = f"tried on {counted(comparison.num_groups, 'group')}"
    if comparison.failures:
        text += f", and failed for {comparison.failures.total()}"
    if trial.num_skipped:
        text += (
            f" ({trial.num_skipped} more cannot be read, have redacted texts, or their dataset row "
            "is unknown)"
        )
    return text
