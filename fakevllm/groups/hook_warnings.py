"""Rate-limited warnings about failures of hooks (the user's functions). This module does no I/O.

The first failure of each kind is logged at once. After that, at most one line per interval is
logged for this kind. Each of these lines has the number of failures since the previous line. The
hook process prints the tracebacks.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakevllm.hooks.results import HookReason, hook_reason
from fakevllm.ledger.records import GroupRecord, SiblingRecord
from fakevllm.release.arms import OTHER_ARM
from fakevllm_runtime.log_throttle import LogThrottle

INTERVAL_S = 60.0
"""Minimum number of seconds between two warnings of one kind. Without this limit, a hook that
always fails would cause a log line for every request."""
_NOT_THE_OVERRIDES_FAULT = (429, 499)
"""HTTP statuses of a sibling that are never caused by request fields that a hook changed: 429 (too
many requests) and 499 (cancelled).
"""
MAX_ERROR_CHARS = 300
"""Maximum number of characters quoted from the engine's error message."""


@dataclass(frozen=True, slots=True)
class HookKind:
    """One of the hook functions, with the texts of the warnings about a failure of this hook."""

    name: str
    effect: str
    """Text that describes the effect of one failure on training. The app gets its answer in any
    case."""
    effects: str
    """Text that describes the effect of several failures. In the warning, the number of failures
    stands before this text."""
    fix: str = ""
    """Text that says what the user can do. If it is empty, the warning suggests running
    `fakevllm check-hook`."""


REWARD = HookKind(
    "on_compute_relative_reward", "the group is dropped, not trained", "groups dropped"
)
OTHER_ARM_REWARD = HookKind(
    "on_compute_relative_reward",
    "the group, which is of an arm that does not train, is not measured",
    "groups of arms that do not train not measured",
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


def reward_failure(group: GroupRecord) -> tuple[HookKind, str | None]:
    """Return the pair (kind, reason) for a warning that a group has no rewards. The kind contains
    the texts of the warning. The reason is None if the group has its rewards, so that there is
    nothing to warn about.

    An arm decides which weights answer a group. In an arm that is not trained, `group.reason` has
    two parts: a slug for this case, then the reason of the hook's failure. Only the second part is
    returned.
    """
    prefix, reason = f"{OTHER_ARM}: ", group.reason
    if reason is not None and reason.startswith(prefix):
        return OTHER_ARM_REWARD, reason.removeprefix(prefix)
    return REWARD, reason if group.state == "dropped" else None


class HookWarnings:
    """A rate-limited source of warnings about failing hooks. A proxy has one such object.

    >>> warnings = HookWarnings(Path("mine"), Path("ledger.sqlite"))
    >>> warnings.line(REWARD, "hook_length: got 1, want 2", 0.0).partition(":")[0]
    'on_compute_relative_reward failed (hook_length'
    >>> warnings.line(REWARD, "hook_length: got 1, want 2", 1.0) is None
    True
    """

    def __init__(self, hooks: Path, ledger: Path) -> None:
        """Create the object. `hooks` and `ledger` are the paths of the hook files and of the
        ledger. These paths appear in the `fakevllm check-hook` command that a warning suggests."""
        command = shlex.join(["fakevllm", "check-hook", str(hooks), "--ledger", str(ledger)])
        self._default_fix = f"to see why: {command}"
        # Bounded by the number of slugs and of lines in the hook files.
        self._throttle = LogThrottle(INTERVAL_S)

    def line(self, hook: HookKind, reason: str | None, now: float) -> str | None:
        """Return the warning to log for a request that ended with `reason`. Return None if `reason`
        is not the failure of a hook, or if the rate limit suppresses the warning. `now` is in
        seconds on a monotonic clock."""
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
    """Return an error text if the engine has refused request fields that a hook set. Return None if
    no such field was refused.

    `siblings` are all sampled answers of a group in which the hook set request fields. Sibling 0,
    the lead, is the app's unchanged request. The fields count as refused if the engine accepted the
    lead, but returned a client error (HTTP status 4xx, except 429 and 499) for another sibling.

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
    """Return the kind of a failure. Warnings are rate-limited for each kind separately. The kind
    contains the reason slug. If the hook raised an exception, the kind also contains the
    exception's type and its line in the hook file. It does not contain the exception's message.

    >>> kind_of("hook_raised: KeyError: 'b' (mine.py:2)"), kind_of("hook_nan: reward 1 is nan")
    (('hook_raised', 'KeyError', 'mine.py:2)'), ('hook_nan',))
    """
    slug, _, detail = reason.partition(": ")
    if slug != HookReason.RAISED:
        return (slug,)
    return slug, detail.partition(":")[0], detail.rpartition("(")[2]
