"""Find the steps at which rewards change their meaning, because the hooks or the job changed.

The mean reward of a step can be compared with that of another step only if the same hooks gave the
rewards, for the same job. Curves break at each change, and the best checkpoint is chosen only among
comparable checkpoints. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

GONE_AFTER_STEPS = 5
"""Number of consecutive steps without a reward of certain hooks, after which these hooks count as
gone. Apps with different hooks may share a server, and not every step has rewards of every app."""


@dataclass(slots=True)
class _Known:
    """The digests that are in use: each digest with the number of steps since it was last seen."""

    ages: dict[str, int] = field(default_factory=dict[str, int])

    def observe(self, digests: frozenset[str]) -> bool:
        """Add the digests of the next step. Return True if one of them is new, except for the first
        digests."""
        if not digests:  # unknown: an older server or ledger, or rewards without hooks
            return False
        is_changed = bool(self.ages) and not digests <= self.ages.keys()
        if is_changed:
            self.ages.clear()
        ages = {digest: age + 1 for digest, age in self.ages.items()}
        ages |= dict.fromkeys(digests, 0)
        self.ages = {digest: age for digest, age in ages.items() if age < GONE_AFTER_STEPS}
        return is_changed


class RewardChanges:
    """Finds changes of the hooks and of the job, from step to step.

    >>> changes = RewardChanges()
    >>> changes.observe(["a"], ["j"]), changes.observe(["a"], ["j"]), changes.observe(["b"], ["j"])
    ('', '', 'the hooks changed')
    >>> changes.observe([], []), changes.observe(["b"], ["k"])
    ('', 'the job changed')
    """

    def __init__(self) -> None:
        self._hooks = _Known()
        self._jobs = _Known()

    def observe(self, hooks: Iterable[str], jobs: Iterable[str]) -> str:
        """Return what changed at the next step, in plain words. Return "" if nothing changed.

        `hooks` are the digests of the hooks that gave rewards of the step, and `jobs` the digests
        of its jobs. Empty digests are unknown, and an unknown digest is no change.
        """
        changed = [
            name
            for name, known, digests in (
                ("the hooks", self._hooks, hooks),
                ("the job", self._jobs, jobs),
            )
            if known.observe(frozenset(filter(None, digests)))
        ]
        return f"{' and '.join(changed)} changed" if changed else ""
