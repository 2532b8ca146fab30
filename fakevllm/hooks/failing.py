"""What the log says of a hook that fails: each kind of failure once, then now and then with
a count. Pure. The first traceback of each kind is the hook process's own to print."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from fakevllm.seldom import Seldom

TELL_AGAIN_S = 60.0
"""A hook that always fails does so at every request."""
_OURS = "hook_closed"
"""The proxy was stopping: nothing to mend."""


@dataclass(frozen=True, slots=True)
class HookKind:
    name: str
    effect: str
    """Of one failure; the app has its answer whatever fails."""
    effects: str


REWARD = HookKind(
    "on_compute_relative_reward", "the group is dropped, not trained", "groups dropped"
)
SUBMIT = HookKind(
    "on_user_submit_new_requests",
    "the request is served once, not trained",
    "requests not trained",
)


class Failing:
    """
    >>> failing = Failing(Path("mine"), Path("ledger.sqlite"))
    >>> failing.line(REWARD, "hook_length: got 1, want 2", 0.0).partition(":")[0]
    'on_compute_relative_reward failed (hook_length'
    >>> failing.line(REWARD, "hook_length: got 1, want 2", 1.0) is None
    True
    """

    def __init__(self, hooks: Path, ledger: Path) -> None:
        try_it = shlex.join(["fakevllm", "check-hook", str(hooks), "--ledger", str(ledger)])
        self._mend = f"to see why: {try_it}"
        # Bounded by the slugs and the lines of the hook files.
        self._seldom = Seldom(TELL_AGAIN_S)

    def line(self, hook: HookKind, reason: str | None, now: float) -> str | None:
        """Of a group that came to what it is for `reason`, where the log is to hear of it."""
        if reason is None or not reason.startswith("hook_") or reason.startswith(_OURS):
            return None
        due = self._seldom.due((hook, *kind_of(reason)), now)
        if due is None:
            return None
        if due.is_first:
            return (
                f"{hook.name} failed ({reason}): the app got its answer, and {hook.effect}; "
                f"{self._mend}"
            )
        num_more = due.num_untold + 1
        return f"{hook.name} failed {num_more} times more (now: {reason}): {hook.effects}"


def kind_of(reason: str) -> tuple[str, ...]:
    """The slug; of what was raised its type and place too, not its words.

    >>> kind_of("hook_raised: KeyError: 'b' (mine.py:2)"), kind_of("hook_nan: reward 1 is nan")
    (('hook_raised', 'KeyError', 'mine.py:2)'), ('hook_nan',))
    """
    slug, _, detail = reason.partition(": ")
    if slug != "hook_raised":
        return (slug,)
    return slug, detail.partition(":")[0], detail.rpartition("(")[2]
