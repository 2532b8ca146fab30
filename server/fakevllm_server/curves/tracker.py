"""The protocol of a tracker: a program or service that shows the curves of a run, such as
TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.curves.points import ChartItem, Cursor


class TrackerMissing(ConfigError):
    """Error for a tracker that cannot be used, because its package is not installed or because the
    user has turned it off. A retry would not help."""


class Tracker(Protocol):
    """Writes the curves of one run to a tracker. Each tracker has a cursor of its own, so a slow
    tracker does not delay another one.

    Only one process may write at a time.
    """

    def cursor(self) -> Cursor:
        """Return the position in the journal up to which the curves were written. If it is unknown,
        return the beginning of the journal."""
        ...

    def load(self) -> None:
        """Import the tracker's package. Raises TrackerMissing if the tracker cannot be used."""
        ...

    def write(self, items: Sequence[ChartItem], cursor: Cursor) -> None:
        """Write `items` (points of curves, and rollbacks of the run), and then `cursor`.

        Raises TrackerMissing if the tracker cannot be used. After any other error, a later call
        gets the same items again, but further items may come before them.
        """
        ...

    def clear(self) -> None:
        """Delete the curves and the cursor."""
        ...

    def close(self) -> None:
        """Give up everything that is open. The next call of `write` opens it again."""
        ...
