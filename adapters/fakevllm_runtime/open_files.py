"""The limit on this process's open files, and the number of connections that the limit allows.

Every connection is an open file. A process that has reached its limit can neither accept
connections nor open its database. Therefore the number of connections is kept well below the limit.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

WANTED_FILES = 65_536
"""Number of open files that the process asks for. A shell often sets a limit of 1,024, although the
system allows far more."""
RESERVED_FILES = 256
"""Number of files that are kept for everything except connections, such as databases, logs and the
pipes of child processes."""


@dataclass(frozen=True, slots=True)
class FileBudget:
    """The distribution of the files that a process may open: connections of clients, connections to
    the engine, and a reserve."""

    total: int

    @property
    def num_connections(self) -> int:
        """Maximum number of connections that clients may open.

        >>> FileBudget(65_536).num_connections, FileBudget(1024).num_connections
        (32640, 384)
        """
        return max(1, (self.total - self._reserved) // 2)

    @property
    def num_calls(self) -> int:
        """Maximum number of connections to the engine, which is equal to `num_connections`."""
        return self.num_connections

    @property
    def _reserved(self) -> int:
        return min(RESERVED_FILES, self.total // 2)


DEFAULT_FILES = FileBudget(1_024)
"""The budget of a process that has not raised its limit."""


def raise_file_limit(wanted: int = WANTED_FILES) -> FileBudget:
    """Raise this process's soft limit on open files as far as the system allows, but at most to
    `wanted`. Return the budget for the new limit.

    If the soft limit is already `wanted` or higher, the limit stays unchanged, and the budget is
    that for `wanted` files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FileBudget(wanted)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS has a second, lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))
    return FileBudget(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
