"""Keeps the curves in one tracker up to date, in a process of its own. `ProcessFollower` starts the
process, and `main` is the code that it runs.

The process reads the journal itself. It ends when its standard input closes, so it does not survive
its server. Each line of its output is the level and the text of a line for the server's log.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

from fakevllm_server.curves.run_follower import CLOSE_LIMIT_S, EVERY_S, Follower
from fakevllm_server.curves.sample_reader import SampleReader, SampleRules
from fakevllm_server.curves.trackers import TRACKERS

log = logging.getLogger("fakevllm.server")

MAX_RETRY_S = 300.0
"""Maximum seconds between two attempts to write. Each attempt of wandb to reach its server leaves a
folder."""
RESTART_S = 60.0
"""Seconds after which a process that died is started again."""
LOCK_LIMIT_S = 60.0
"""Maximum seconds to wait for the end of the process of a server that was killed."""
LOCK_POLL_S = 0.1
END_LIMIT_S = 30.0
"""Seconds after which the process ends in any case, when its server has ended. wandb may wait
without a limit. This is less than LOCK_LIMIT_S, so the next process gets the lock."""
RELAY_LIMIT_S = 1.0
"""Maximum seconds to wait for the last lines of a process that has ended."""


class ProcessFollower:
    """A process that keeps the curves of a running server in one tracker up to date, and a thread
    that watches it."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        every_s: float = EVERY_S,
        restart_s: float = RESTART_S,
        close_limit_s: float = CLOSE_LIMIT_S,
        samples: SampleRules | None = None,
    ) -> None:
        self._command = [sys.executable, "-m", __name__, name, str(run_dir), str(every_s)]
        self._command += [] if samples is None else [samples.to_json()]
        self._restart_s = restart_s
        self._close_limit_s = close_limit_s
        self._title = TRACKERS[name].title
        self._is_closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        """Lock for the start of the process, which must not happen after `close`."""
        self._last_problem: str | None = None
        self._thread = threading.Thread(target=self._watch, name=f"curves of {name}", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the last process that was started; None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Make the process write the curves of everything that is in the journal, and wait for its
        end. Kill it if it does not end within `close_limit_s` seconds."""
        with self._lock:
            self._is_closing.set()
            process = self._process
        if process is None:
            return
        if process.poll():
            log.warning(
                "The last %s curves are not written, because their process had ended with exit "
                "code %s: the next server of this run writes them.",
                self._title,
                process.returncode,
            )
        _close_input(process)
        try:
            process.wait(self._close_limit_s)
        except subprocess.TimeoutExpired:
            log.warning(
                "%s did not write the last curves within %.0f s and was ended: the next server of "
                "this run writes them.",
                self._title,
                self._close_limit_s,
            )
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The thread reads until the tracker's own child processes have closed the output, too.
        self._thread.join(RELAY_LIMIT_S)

    def _watch(self) -> None:
        """Start the process, and start it again whenever it dies. A process that ends by itself has
        given its tracker up."""
        while not self._is_closing.is_set():
            try:
                problem = self._run()
            except OSError as error:
                problem = f"cannot be started: {error.strerror}"
            if problem is None:
                return
            if problem != self._last_problem and not self._is_closing.is_set():
                log.warning("The process for %s curves %s; retrying", self._title, problem)
            self._last_problem = problem
            self._is_closing.wait(self._restart_s)

    def _run(self) -> str | None:
        """Run the process until it ends. Return what went wrong, or None if the process has ended
        by itself."""
        with self._lock:
            if self._is_closing.is_set():
                return None
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches only the server
            )
        process = self._process
        assert process.stdout is not None
        last_line = self._relay(process.stdout)
        code = process.wait()
        process.stdout.close()
        _close_input(process)
        return None if code == 0 else f"ended with exit code {code} ({last_line})"

    def _relay(self, output: IO[str]) -> str:
        """Write the lines of the process to the log, and return the last line."""
        last_line = "no output"
        for line in output:
            last_line = line.strip() or last_line
            level, _, text = last_line.partition(" ")
            number = logging.getLevelNamesMapping().get(level, logging.DEBUG)
            log.log(number, "%s", text if number != logging.DEBUG else last_line)
        return last_line


def _close_input(process: subprocess.Popen[str]) -> None:
    """Close the standard input of a process, which asks it to end."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def main() -> None:
    """Run the process of a tracker. The command line has the tracker, the run directory, the
    seconds between two reads of the journal, and perhaps the rules for tables of samples."""
    name, run_dir, every_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    rules = [SampleRules.from_json(text) for text in sys.argv[4:]]
    samples = SampleReader(run_dir, rules[0]) if rules else None
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    follower = Follower(run_dir, TRACKERS[name], every_s, MAX_RETRY_S, samples)
    threading.Thread(target=_wait_for_end_of_server, args=[follower], daemon=True).start()
    with _single_process(run_dir, name):
        follower.run()


class _OneLine(logging.Formatter):
    """A formatter of log records whose texts have one line each."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split())


def _wait_for_end_of_server(follower: Follower) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    follower.begin_close()
    time.sleep(END_LIMIT_S)
    os._exit(1)


@contextlib.contextmanager
def _single_process(run_dir: Path, name: str) -> Generator[None]:
    """Hold the lock of a tracker's process, so that two of them never write at the same time. Wait
    for the process of a server that was killed, which ends soon."""
    lock = os.open(run_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(lock)


if __name__ == "__main__":
    main()
