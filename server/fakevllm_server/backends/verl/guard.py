"""`python -m fakevllm_server.backends.verl.guard SESSION FOLDER`: ends what a trainer leaves.

Ray ends with the process that started it, but for helpers that notice only after a while. The
guard is no part of the trainer's session; it waits until its standard input closes, which the
trainer held open, ends whatever is left of that session and removes Ray's folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from fakevllm_server.backends.process.procfs import SESSION, living

ROUNDS = 50
"""Processes that were about to start others are found in a later round."""
BETWEEN_ROUNDS_S = 0.1


def start_guard(folder: Path) -> subprocess.Popen[bytes] | None:
    """Hold what it returns. None where this process does not lead its session: others are in it."""
    if os.getsid(0) != os.getpid():
        return None
    command = [sys.executable, "-m", "fakevllm_server.backends.verl.guard"]
    return subprocess.Popen(
        [*command, str(os.getpid()), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def end(session: int) -> None:
    for _ in range(ROUNDS):
        left = living(SESSION, session)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not left:
            return
        time.sleep(BETWEEN_ROUNDS_S)


def main() -> None:
    session, folder = int(sys.argv[1]), Path(sys.argv[2])
    while os.read(0, 1):
        pass
    end(session)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
