"""The kill switch: while it is on, requests are served once and none is fanned out.

It is a file beside the ledger, so that a restart stays paused, and so that a full disk or a ledger
in trouble cannot keep it from being thrown: what cannot be written down still holds until the
proxy stops.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger("fakevllm.admission.kill_switch")

FILE_NAME = "paused"
_TOLD = "fakevllm does not fan out while this file is here; `fakevllm resume` takes it away.\n"


class KillSwitch:
    """One proxy's. The file is read at the start and written by `set`; it is not followed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_on = file.exists()
        if self._is_on:
            log.warning("paused: requests are served once until `fakevllm resume` (%s)", file)

    @property
    def is_on(self) -> bool:
        return self._is_on

    def set(self, is_on: bool) -> str | None:
        """Counts at once. The trouble that keeps a restart from knowing, None where there is
        none."""
        if is_on != self._is_on:
            log.warning("%s", "paused" if is_on else "resumed")
        self._is_on = is_on
        try:
            if is_on:
                self._file.write_text(_TOLD, encoding="utf-8")
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            # A file that was made and could not be filled counts all the same.
            if self._file.exists() == is_on:
                return None
            return f"{self._file} cannot be changed: {error.strerror}"
        return None


def pause_file(run_dir: Path) -> Path:
    return run_dir / FILE_NAME
