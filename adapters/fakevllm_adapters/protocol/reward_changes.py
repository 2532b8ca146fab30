"""Find the training steps at which the reward hooks or the job changed.

The mean rewards of two steps are comparable only if the same hooks computed them for the same job.

Plots of the reward are therefore interrupted at each change, and the best checkpoint is chosen only
among comparable checkpoints. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

GONE_AFTER_STEPS = 5
"""Hooks count as no longer in use if they gave no reward in this many consecutive steps. Fewer
steps prove nothing: several apps with different hooks may share a server, and a step may have no
rewards of some apps."""


@dataclass(slots=True)
class _Known:
    """The digests (hashes) of the hooks, or of the jobs, that recent steps used. Each digest has
    the number of steps since it was last used."""

    ages: dict[str, int] = field(default_factory=dict[str, int])

    def observe(self, digests: frozenset[str]) -> bool:
        """Record the digests of the next step. Return True if one of them is new. The very first
        digests do not count as new."""
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
    """Finds changes of the reward hooks and of the job from one training step to the next.

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
        """Record the next training step, and return a text that says what changed. Return "" if
        nothing changed.

        `hooks` are the digests of the hooks that gave rewards in this step. `jobs` are the digests
        of the step's jobs. An empty digest means that the digest is unknown, and does not count as
        a change.
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
