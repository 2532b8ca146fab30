"""What the log says of a hook that fails: each kind of failure once, then now and then with
a count. Pure. The first traceback of each kind is the hook process's own to print."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakevllm.hooks.results import HookReason, hook_reason
from fakevllm.ledger.records import SiblingRecord
from fakevllm.runtime.log_throttle import LogThrottle

TELL_AGAIN_S = 60.0
"""A hook that always fails does so at every request."""
_NOT_FOR_WHAT_IT_ASKS = (429, 499)
"""Too many at once, cancelled."""
MAX_TOLD = 300
"""Characters of an engine's words."""


@dataclass(frozen=True, slots=True)
class HookKind:
    name: str
    effect: str
    """Of one failure; the app has its answer whatever fails."""
    effects: str
    mend: str = ""
    """The next step, where `check-hook` shows nothing of it."""


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
    "the group goes on without it",
    "groups went on without some",
    "mend what it changes for that sibling",
)


class HookWarnings:
    """
    >>> failing = HookWarnings(Path("mine"), Path("ledger.sqlite"))
    >>> failing.line(REWARD, "hook_length: got 1, want 2", 0.0).partition(":")[0]
    'on_compute_relative_reward failed (hook_length'
    >>> failing.line(REWARD, "hook_length: got 1, want 2", 1.0) is None
    True
    """

    def __init__(self, hooks: Path, ledger: Path) -> None:
        try_it = shlex.join(["fakevllm", "check-hook", str(hooks), "--ledger", str(ledger)])
        self._mend = f"to see why: {try_it}"
        # Bounded by the slugs and the lines of the hook files.
        self._throttle = LogThrottle(TELL_AGAIN_S)

    def line(self, hook: HookKind, reason: str | None, now: float) -> str | None:
        """Of a group that came to what it is for `reason`, where the log is to hear of it."""
        slug = hook_reason(reason)
        # A hook process that was closed with the proxy has no fault to mend.
        if reason is None or slug in (None, HookReason.CLOSED):
            return None
        due = self._throttle.due((hook, *kind_of(reason)), now)
        if due is None:
            return None
        if due.is_first:
            return (
                f"{hook.name} failed ({reason}): the app got its answer, and {hook.effect}; "
                f"{hook.mend or self._mend}"
            )
        num_more = due.num_suppressed + 1
        return f"{hook.name} failed {num_more} times more (now: {reason}): {hook.effects}"


def refused_override(siblings: Sequence[SiblingRecord]) -> str | None:
    """Of a group whose siblings the hook changed, where the engine takes the lead as the app sent
    it and refuses one of them.

    >>> lead = SiblingRecord(index=0, served=True, best=True, status=200)
    >>> other = SiblingRecord(index=1, served=False, best=False, status=400, error="top_p: 7")
    >>> refused_override([lead, other])
    'hook_override: the engine refuses sibling 1: top_p: 7'
    """
    if not siblings or siblings[0].status != 200:
        return None
    for each in siblings[1:]:
        if 400 <= each.status < 500 and each.status not in _NOT_FOR_WHAT_IT_ASKS:
            told = (each.error or str(each.status))[:MAX_TOLD]
            return f"hook_override: the engine refuses sibling {each.index}: {told}"
    return None


def kind_of(reason: str) -> tuple[str, ...]:
    """The slug; of what was raised its type and place too, not its words.

    >>> kind_of("hook_raised: KeyError: 'b' (mine.py:2)"), kind_of("hook_nan: reward 1 is nan")
    (('hook_raised', 'KeyError', 'mine.py:2)'), ('hook_nan',))
    """
    slug, _, detail = reason.partition(": ")
    if slug != HookReason.RAISED:
        return (slug,)
    return slug, detail.partition(":")[0], detail.rpartition("(")[2]
