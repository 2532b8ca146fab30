"""The kill switch, with which the user stops the training on traffic. While the switch is on, each
request is sampled once and not trained.

While the switch is on, a file exists in the run directory. Therefore the switch stays on when the
proxy restarts. The switch also works if the disk is full, or if the ledger (the proxy's database)
is broken. If the file cannot be created or deleted, the switch still changes its state. The new
state is then lost when the proxy stops.
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
    """The kill switch of one proxy. A file in the run directory exists while the switch is on. The
    constructor checks whether the file exists, and `set` creates or deletes the file. If anything
    else creates or deletes the file, the running proxy does not notice. Such a change takes effect
    only when the proxy restarts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_on = file.exists()
        if self._is_on:
            log.warning("paused: requests are served once until `fakevllm resume` (%s)", file)

    @property
    def is_on(self) -> bool:
        return self._is_on

    def set(self, is_on: bool) -> str | None:
        """Turn the kill switch on or off at once. While it is on, no request is trained.

        Return None on success, or an error message if the switch's file could not be created or
        deleted. In the case of an error, the new state is lost when the proxy restarts.
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
            # Only the file's existence matters, so a failed write of the file's text is no error.
            if self._file.exists() == is_on:
                return None
            return f"{self._file} cannot be changed: {error.strerror}"
        return None


def pause_file(run_dir: Path) -> Path:
    """Return the path of the kill switch's file, whose existence means that the switch is on."""
    return run_dir / FILE_NAME
