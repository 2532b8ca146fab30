"""How many of the latest groups failed in a hook (a function of the user's). This module does no
I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fakevllm.hooks.results import HookReason, hook_reason

NUM_LATEST = 50
"""Number of groups that are counted."""


@dataclass(frozen=True, slots=True)
class HookFailureCount:
    """How many of the latest groups failed in a hook."""

    num_failed: int
    num_groups: int
    """Number of groups that were counted, at most NUM_LATEST."""
    reason: str
    """Reason of the latest failure, without the message of an exception: the message may quote a
    text of the app."""


class LatestHookFailures:
    """The outcomes of the hooks for the latest groups. If other hooks are loaded, the count starts
    again.

    >>> latest = LatestHookFailures()
    >>> latest.add("hook_raised: KeyError: 'b' (mine.py:2)", hooks="f30a")
    >>> latest.add(None, hooks="f30a")
    >>> latest.count()
    HookFailureCount(num_failed=1, num_groups=2, reason='hook_raised: KeyError (mine.py:2)')
    """

    def __init__(self) -> None:
        self._reasons: deque[str | None] = deque(maxlen=NUM_LATEST)
        self._hooks = ""

    def add(self, reason: str | None, hooks: str) -> None:
        """Count a group that ended with this reason. `hooks` is the digest of the hook files that
        score new groups. None and reasons that do not describe the
        failure of a hook count as a success. A hook process that was closed with the proxy says
        nothing about the hook, so such a group is not counted."""
        if hooks != self._hooks:
            self._reasons.clear()
            self._hooks = hooks
        slug = hook_reason(reason)
        if slug is not HookReason.CLOSED:
            self._reasons.append(None if slug is None else reason)

    def count(self) -> HookFailureCount | None:
        """Return the counts. Return None if none of the latest groups failed in a hook."""
        failed = [reason for reason in self._reasons if reason is not None]
        if not failed:
            return None
        return HookFailureCount(len(failed), len(self._reasons), _without_message(failed[-1]))


def _without_message(reason: str) -> str:
    """Return the reason without the message of an exception.

    >>> _without_message("hook_timeout: no result after 30 s")
    'hook_timeout: no result after 30 s'
    >>> _without_message("hook_raised: AssertionError (mine.py:2)")
    'hook_raised: AssertionError (mine.py:2)'
    """
    slug, _, detail = reason.partition(": ")
    if slug != HookReason.RAISED:
        return reason
    error, _, place = detail.rpartition(" (")
    return f"{slug}: {error.partition(':')[0]} ({place}"
