"""Text lines that describe what new hooks change, for the terminal and for the proxy's log."""

from __future__ import annotations

from fakevllm.rescoring.comparison import HookComparison
from fakevllm.runtime.plurals import counted


def change_lines(comparison: HookComparison) -> list[str]:
    """Return text lines that describe how the rewards of new hooks differ from the old rewards.
    `comparison` has compared the rewards of many groups (requests with their sampled answers)."""
    num = comparison.num_compared
    return [
        f"correlation of old and new rewards: {_number(comparison.correlation)}, within groups "
        f"{_number(comparison.correlation_within)} ({counted(comparison.num_siblings, 'sibling')})",
        *_noise(comparison),
        f"two siblings change their order in {share(comparison.num_reordered, num)} groups",
        f"several siblings share the highest reward in {share(comparison.new.num_tied, num)} "
        f"groups (old: {comparison.old.num_tied})",
        f"a signal is gained in {share(comparison.num_gained, num)} groups, and lost in "
        f"{share(comparison.num_lost, num)}",
        "another sibling would have been served in "
        f"{share(comparison.num_served_otherwise, comparison.num_served)} groups",
    ]


def _noise(comparison: HookComparison) -> list[str]:
    """Return a line about equal answers that got different rewards, if there are such answers."""
    if not comparison.noise_share:
        return []
    line = f"noise of the new rewards within groups: {comparison.noise_share:.0%}"
    if comparison.correlation_without_noise is not None:
        line += f"; without it, the correlation is {comparison.correlation_without_noise:.2f}"
    return [line.replace("%", " %")]


def share(num: int, total: int) -> str:
    """Return `num` and its percentage of `total` as a text.

    >>> share(3, 12), share(0, 0)
    ('3 of 12 (25 %)', '0 of 0')
    """
    return f"{num} of {total} ({num / total:.0%})".replace("%", " %") if total else f"{num} of 0"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
