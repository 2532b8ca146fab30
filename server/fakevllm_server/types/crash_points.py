"""Named places at which a test may end the process as a `kill -9` would.

`CRASH_AT=plan.after_commit` ends it there, `CRASH_AT=plan.after_commit:3` at the third time. Unset,
a point costs one comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable

EXIT_CODE = 137
"""As a shell tells of SIGKILL."""


def exit_at(where: str, before: Callable[[], object] = lambda: None) -> Callable[[str], object]:
    """What ends the process at `label` or `label:times`; `before` is done first."""
    aim, _, times = where.partition(":")
    left = int(times or 1)

    def pass_by(label: str) -> None:
        nonlocal left
        left -= label == aim
        if label == aim and left == 0:
            before()
            os._exit(EXIT_CODE)

    return pass_by


on_pass: Callable[[str], object] | None = (
    exit_at(os.environ["CRASH_AT"]) if "CRASH_AT" in os.environ else None
)
"""Told each label that is passed; tests put their own here."""


def crash_point(label: str) -> None:
    if on_pass is not None:
        on_pass(label)
