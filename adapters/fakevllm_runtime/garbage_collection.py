"""Settings of Python's garbage collector for a server that runs for long.

Most objects of a request are freed as soon as nothing refers to them. Only cycles wait for the
collector, which by default looks for them every 700 new objects, several times per request.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""Number of new objects after which the collector looks for cycles among them. They take about a
megabyte."""


def tune_garbage_collection() -> None:
    """Collect seldom, and never look at the objects that exist now.

    Call this function when the process has loaded its code, just before it serves.
    """
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *older)
