"""The kill switch of fan-out. While the switch is on, each request is sampled once and not trained.

The switch is a file in the run directory, so a restarted proxy stays paused. A full disk or a
broken ledger cannot prevent the use of the switch. If the file cannot be written, the switch still
has effect until the proxy stops.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger("fakevllm.admission.kill_switch")

FILE_NAME = "paused"
_FILE_TEXT = (
    "While this file exists, fakevllm does not fan out. `fakevllm resume` deletes the file.\n"
)


class KillSwitch:
    """The kill switch of one proxy. The file is read at the start and written by `set`. Other
    changes of the file have no effect before a restart."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_on = file.exists()
        if self._is_on:
            log.warning("paused: requests are served once until `fakevllm resume` (%s)", file)

    @property
    def is_on(self) -> bool:
        return self._is_on

    def set(self, is_on: bool) -> str | None:
        """Turn the switch on or off at once.

        Return None on success, or the error message if the file could not be changed. After such an
        error, a restarted proxy will not know the new state.
        """
        if is_on != self._is_on:
            log.warning("%s", "paused" if is_on else "resumed")
        self._is_on = is_on
        try:
            if is_on:
                self._file.write_text(_FILE_TEXT, encoding="utf-8")
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            # A file that was created but could not be filled is sufficient.
            if self._file.exists() == is_on:
                return None
            return f"{self._file} cannot be changed: {error.strerror}"
        return None


def pause_file(run_dir: Path) -> Path:
    """Return the path of the kill switch's file."""
    return run_dir / FILE_NAME
