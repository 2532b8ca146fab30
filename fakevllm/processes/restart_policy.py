"""Decides whether a process that died is started again, and when. This module does no I/O."""

from __future__ import annotations

STABLE_S = 30.0
"""Seconds after which a process counts as started well. A process that cannot work usually dies
within a few seconds. The time is longer, because importing takes long on a busy machine."""
FIRST_PAUSE_S = 1.0
"""Seconds before the start after the second early death in a row. Each further early death doubles
the pause. There is no pause after the first death, because requests wait meanwhile."""
MAX_EARLY_DEATHS = 6
"""Number of early deaths in a row after which the process is given up. The pauses take 15 s until
then."""
BAD_SETTINGS_CODE = 2
"""Exit code of a program that refuses its settings. Another start would end in the same way."""


class RestartPolicy:
    """The restarts of one process, with exponential backoff and a limit on early deaths.

    A death is early if it comes within STABLE_S seconds after the start. After any other death, the
    process is started again at once, and the early deaths before it no longer count. A process that
    ends with BAD_SETTINGS_CODE is never started again.

    >>> policy = RestartPolicy()
    >>> policy.record_start(100.0)
    >>> policy.pause_after_death(exit_code=1, now_s=101.0)
    0.0
    """

    def __init__(self) -> None:
        self._started_s = 0.0
        self._num_early_deaths = 0

    def record_start(self, now_s: float) -> None:
        """Record that the process starts now. `now_s` is the reading of a monotonic clock."""
        self._started_s = now_s

    def pause_after_death(self, exit_code: int, now_s: float) -> float | None:
        """Return the seconds to wait before the next start, or None if the process must not be
        started again."""
        if exit_code == BAD_SETTINGS_CODE:
            return None
        if now_s - self._started_s >= STABLE_S:
            self._num_early_deaths = 0
            return 0.0
        self._num_early_deaths += 1
        if self._num_early_deaths >= MAX_EARLY_DEATHS:
            return None
        if self._num_early_deaths == 1:
            return 0.0
        return FIRST_PAUSE_S * 2 ** (self._num_early_deaths - 2)
