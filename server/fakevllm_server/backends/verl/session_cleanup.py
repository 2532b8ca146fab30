"""The cleanup process, which kills all processes that a killed trainer leaves running.

    python -m fakevllm_server.backends.verl.session_cleanup SESSION FOLDER

When the trainer, which started Ray, ends, Ray ends too. But some of Ray's helper processes continue
to run for a while. The cleanup process runs in a session of its own, and its standard input is a
pipe from the trainer. When the trainer ends, the pipe closes. The cleanup process then kills all
processes of the trainer's session SESSION, and removes Ray's folder FOLDER.
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

from fakevllm_server.backends.process.procfs import SESSION, live_processes

MAX_ROUNDS = 50
"""Maximum number of rounds, in each of which all processes of the session are killed. A further
round is necessary if a process has started another process just before it was killed."""
ROUND_INTERVAL_S = 0.1


def start_cleanup_process(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start the cleanup process for the session of the calling process, and return the cleanup
    process. `folder` is Ray's folder, which the cleanup removes. Keep a reference to the returned
    object. If the object is deleted, the standard input of the cleanup process closes and the
    cleanup begins.

    If the calling process is not the leader of its session, start nothing and return None. The
    session then also contains processes that do not belong to the trainer, and the cleanup would
    kill them.
    """
    if os.getsid(0) != os.getpid():
        return None
    command = [sys.executable, "-m", "fakevllm_server.backends.verl.session_cleanup"]
    return subprocess.Popen(
        [*command, str(os.getpid()), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_session(session: int) -> None:
    """Kill all processes of an operating-system session. Processes may start new processes
    meanwhile. Therefore repeat the kills until no process is left, for at most `MAX_ROUNDS`
    rounds."""
    for _ in range(MAX_ROUNDS):
        processes = live_processes(SESSION, session)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not processes:
            return
        time.sleep(ROUND_INTERVAL_S)


def main() -> None:
    session, folder = int(sys.argv[1]), Path(sys.argv[2])
    while os.read(0, 1):
        pass
    kill_session(session)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
