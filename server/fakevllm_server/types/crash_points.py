"""Named points in the code at which a test can end the process abruptly, as `kill -9` does.

`CRASH_AT=plan.after_commit` ends the process when it first passes the point `plan.after_commit`.
`CRASH_AT=plan.after_commit:3` ends the process at the third pass. If the environment variable
`CRASH_AT` is not set, a crash point costs one comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable

EXIT_CODE = 137
"""Exit status that a shell reports for a process killed by SIGKILL."""


def exit_at(spec: str, before: Callable[[], object] = lambda: None) -> Callable[[str], object]:
    """Return a function that ends the process when a certain crash point is passed. Assign the
    returned function to this module's variable `on_pass`.

    `spec` is `LABEL`, the name of the crash point, or `LABEL:N` to end the process at the N-th
    pass. `before` is called just before the process ends.
    """
    target, _, pass_number = spec.partition(":")
    passes_left = int(pass_number or 1)

    def end_at_target(label: str) -> None:
        nonlocal passes_left
        passes_left -= label == target
        if label == target and passes_left == 0:
            before()
            os._exit(EXIT_CODE)

    return end_at_target


on_pass: Callable[[str], object] | None = (
    exit_at(os.environ["CRASH_AT"]) if "CRASH_AT" in os.environ else None
)
"""Function that is called with the label of each crash point passed. Tests may replace it."""


def crash_point(label: str) -> None:
    """Mark a point in the code at which a test can end the process. `label` is the name of the
    point."""
    if on_pass is not None:
        on_pass(label)
