"""Decide when edited hook files are tried (loaded, and tested on logged requests). This module does
no I/O, and gets the time as an argument."""

from __future__ import annotations

SETTLE_S = 0.3
"""Seconds for which the files must stay unchanged before they are tried. An editor, or a command
such as `git pull`, may write several files one after the other."""


class ReloadSchedule:
    """Decides when edited hook files are tried (loaded, and tested on logged requests). Each
    version of the files is tried once.

    >>> schedule = ReloadSchedule()
    >>> [schedule.is_due("new", "old", now_s) for now_s in (0.0, 0.1, 0.3, 0.6)]
    [False, False, True, False]
    """

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._seen: str | None = None
        """Digest of the files at the previous call, if they differ from the running hooks."""
        self._seen_at = 0.0
        self._tried: str | None = None
        """Digest of the files that were tried last, if they differ from the running hooks."""

    def is_due(self, files: str | None, running: str, now_s: float) -> bool:
        """Return True if the hook files must be tried now (loaded, and tested on logged requests).

        `files` is the digest of the files, or None if they cannot be read. `running` is the digest
        of the running hooks. `now_s` is in seconds on a monotonic clock.
        """
        if files == running:
            self._seen = self._tried = None
            return False
        if files != self._seen:
            self._seen, self._seen_at = files, now_s
        is_settled = now_s - self._seen_at >= self._settle_s
        if files is None or files == self._tried or not is_settled:
            return False
        self._tried = files
        return True

    def tried(self, files: str | None) -> None:
        """Record that the hook files were tried (loaded, and tested on logged requests). `files` is
        the digest of the files that were read. This digest may differ from the digest that `is_due`
        got, because the files may have been edited meanwhile. Pass None if a temporary problem
        prevented the try. The same files are then tried again."""
        self._tried = files

    @property
    def is_settling(self) -> bool:
        """True if the hook files have changed and the changed files have not been tried (loaded and
        tested) yet."""
        return self._seen is not None and self._seen != self._tried
