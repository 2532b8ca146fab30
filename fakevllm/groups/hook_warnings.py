"""Rate-limited warnings about hooks that fail. This module does no I/O.

The first failure of each kind is logged at once. After that, at most one line per interval is
logged for this kind, with the number of failures. The hook process itself prints the traceback of
the first failure.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakevllm.hooks.results import HookReason, hook_reason
from fakevllm.ledger.records import SiblingRecord
from fakevllm_runtime.log_throttle import LogThrottle

INTERVAL_S = 60.0
"""Seconds between two warnings of one kind. A hook that always fails would otherwise cause a line
for every request."""
_NOT_THE_OVERRIDES_FAULT = (429, 499)
"""HTTP statuses of siblings that did not fail because of their overrides: 429 (too many requests)
and 499 (cancelled)."""
MAX_ERROR_CHARS = 300
"""Maximum number of characters quoted from the engine's error message."""


@dataclass(frozen=True, slots=True)
class HookKind:
    """A hook function and the texts for warnings about it."""

    name: str
    effect: str
    """Text for the effect of one failure. The app gets its answer in any case."""
    effects: str
    """Text for the effect of several failures; their number precedes it."""
    fix: str = ""
    """Text for the user's next step; the default is to run `check-hook`."""


REWARD = HookKind(
    "on_compute_relative_reward", "the group is dropped, not trained", "groups dropped"
)
SUBMIT = HookKind(
    "on_user_submit_new_requests",
    "the request is served once, not trained",
    "requests not trained",
)
OVERRIDES = HookKind(
    "on_user_submit_new_requests",
    "the group continues without that sibling",
    "groups continued without such siblings",
    "fix the fields that the hook returns for that sibling",
)


class HookWarnings:
    """Creates the warnings about failing hooks of one proxy, and limits their rate.

    >>> warnings = HookWarnings(Path("mine"), Path("ledger.sqlite"))
    >>> warnings.line(REWARD, "hook_length: got 1, want 2", 0.0).partition(":")[0]
    'on_compute_relative_reward failed (hook_length'
    >>> warnings.line(REWARD, "hook_length: got 1, want 2", 1.0) is None
    True
    """

    def __init__(self, hooks: Path, ledger: Path) -> None:
        """Create the warnings. `hooks` and `ledger` are paths. A warning suggests a command that
        contains them."""
        command = shlex.join(["fakevllm", "check-hook", str(hooks), "--ledger", str(ledger)])
        self._default_fix = f"to see why: {command}"
        # Bounded by the number of slugs and of lines in the hook files.
        self._throttle = LogThrottle(INTERVAL_S)

    def line(self, hook: HookKind, reason: str | None, now: float) -> str | None:
        """Return the warning for a group or request that ended with `reason`. Return None if no
        hook failed, or if the rate limit suppresses the warning. `now` is in seconds on a monotonic
        clock."""
        slug = hook_reason(reason)
        # A hook process that was closed with the proxy has no fault to fix.
        if reason is None or slug in (None, HookReason.CLOSED):
            return None
        due = self._throttle.due((hook, *kind_of(reason)), now)
        if due is None:
            return None
        if due.is_first:
            return (
                f"{hook.name} failed ({reason}): the app got its answer, and {hook.effect}; "
                f"{hook.fix or self._default_fix}"
            )
        num_more = due.num_suppressed + 1
        return f"{hook.name} failed {num_more} times more (now: {reason}): {hook.effects}"


def refused_override(siblings: Sequence[SiblingRecord]) -> str | None:
    """Return an error text if the engine accepts the lead (the app's own request) but refuses a
    sibling whose request fields the hook has changed. Return None otherwise.

    `siblings` are the siblings of a group for which the hook has changed request fields.

    >>> lead = SiblingRecord(index=0, served=True, best=True, status=200)
    >>> other = SiblingRecord(index=1, served=False, best=False, status=400, error="top_p: 7")
    >>> refused_override([lead, other])
    'hook_override: the engine refuses sibling 1: top_p: 7'
    """
    if not siblings or siblings[0].status != 200:
        return None
    for sibling in siblings[1:]:
        if 400 <= sibling.status < 500 and sibling.status not in _NOT_THE_OVERRIDES_FAULT:
            error = (sibling.error or str(sibling.status))[:MAX_ERROR_CHARS]
            return f"hook_override: the engine refuses sibling {sibling.index}: {error}"
    return None


def kind_of(reason: str) -> tuple[str, ...]:
    """Return the kind of a failure, by which warnings are rate-limited. The kind consists of the
    reason slug and, for an exception, its type and its line in the hook file. The exception's
    message is left out, so that failures with different messages count as one kind.

    >>> kind_of("hook_raised: KeyError: 'b' (mine.py:2)"), kind_of("hook_nan: reward 1 is nan")
    (('hook_raised', 'KeyError', 'mine.py:2)'), ('hook_nan',))
    """
    slug, _, detail = reason.partition(": ")
    if slug != HookReason.RAISED:
        return (slug,)
    return slug, detail.partition(":")[0], detail.rpartition("(")[2]
