"""A Python interpreter that has imported the proxy, the server and their commands, and forks a
process for each program that a test starts.

Importing takes four fifths of the CPU time of a start, and a test run starts more than a thousand
programs. A forked program is a process of its own, with its own session, working directory, log and
standard input. It runs `python -m MODULE` or `python FILE` from there on, and ends as any program
does. A forked program has the environment variables of the test run. A program that needs other
variables is started without a fork, because the imported modules may already have read the
variables.

As a script, this file is the interpreter that forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

IMPORTED = (
    "fakevllm.cli.main",
    "fakevllm.cli.release_table",
    "fakevllm.cli.sessions",
    "fakevllm.demo.command",
    "fakevllm.hooks.check",
    "fakevllm.overwatch.command",
    "fakevllm.replay.command",
    "fakevllm.train.command",
    "fakevllm.web.app",
    "fakevllm_runtime.engines",
    "fakevllm_server.cli.main",
    "fakevllm_server.cli.run_archive",
    "fakevllm_server.web.http_server",
    "openai.resources.chat",
    "pydantic.v1",
    "uvloop",
)
MAX_MESSAGE_BYTES = 65_536


SET_BY_THE_TEST_RUN = ("PYTEST_", "TORCHINDUCTOR_")
"""Beginnings of the names of environment variables that pytest and torch set while tests run. No
program that a test starts reads them."""


def _environment() -> dict[str, str]:
    """Return the environment variables that a test or a user has set."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(SET_BY_THE_TEST_RUN)
    }


_ENVIRONMENT = _environment()


class ForkedProgram:
    """A program in a process that is no child of this one. It has the methods of Popen that tests
    need."""

    def __init__(self, stdin: IO[bytes], status: IO[bytes]) -> None:
        self.stdin = stdin
        self.returncode: int | None = None
        self._status = status
        """A pipe with the process id, and the exit code when the process has ended."""
        self.pid = int(status.readline())

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        return self._await_end(0)

    def wait(self, timeout: float) -> int:
        """Wait until the program has ended, and return its exit code.

        Raises TimeoutExpired if it has not ended in `timeout` seconds.
        """
        code = self._await_end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"the process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _await_end(self, timeout: float) -> int | None:
        if self.returncode is None and wait([self._status.fileno()], timeout):
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode


class PreloadedPython:
    """The interpreter that forks. It is started for the first program, and ends together with the
    interpreter that runs the tests."""

    def __init__(self) -> None:
        self._requests: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None

    def run(
        self, command: Sequence[str], folder: Path, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program without input, and return its exit code and its output.

        Raises TimeoutExpired, and kills the program, if it has not ended in `timeout_s` seconds.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            program = self.start(command, output, folder, errors)
            assert program.stdin is not None
            program.stdin.close()
            try:
                code = program.wait(timeout_s)
            finally:
                program.kill()
            texts: list[str] = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(command, code, *texts)

    def start(
        self, command: Sequence[str], log: IO[bytes], folder: Path, errors: IO[bytes] | None = None
    ) -> ForkedProgram | subprocess.Popen[bytes]:
        """Start a program whose output is appended to `log`, and its errors to `errors` or `log`.

        `command` has the arguments of `python`: `-m MODULE ARGUMENT…` or `FILE ARGUMENT…`.
        """
        errors = errors or log
        if _environment() != _ENVIRONMENT:
            return subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
            )
        if self._requests is None:
            self._requests = self._start_interpreter()
        stdin_read, stdin_write = os.pipe()
        status_read, status_write = os.pipe()
        message = json.dumps({"command": list(command), "folder": str(folder)}).encode()
        files = [stdin_read, log.fileno(), errors.fileno(), status_write]
        socket.send_fds(self._requests, [message], files)
        os.close(stdin_read)
        os.close(status_write)
        return ForkedProgram(os.fdopen(stdin_write, "wb"), os.fdopen(status_read, "rb", 0))

    def _start_interpreter(self) -> socket.socket:
        """Start the interpreter, and return the socket on which it receives requests."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._popen = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno())],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        return ours


PRELOADED_PYTHON = PreloadedPython()


def _serve(requests: socket.socket) -> None:
    """Fork a process for each request, and run the requested program in it. This function returns
    only in a forked process, after its program has ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a forked process would copy all pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers need no wait
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            _fork_and_watch(*descriptors)
            _run_program(**json.loads(message))
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_and_watch(stdin: int, log: int, errors: int, status: int) -> None:
    """Fork the process of the program, and return only in the new process. The old process stays as
    a watcher: it writes the id and then the exit code of the new process to `status`, and exits."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for descriptor, own in ((stdin, 0), (log, 1), (errors, 2)):
            os.dup2(descriptor, own)
        for descriptor in (stdin, log, errors, status):
            os.close(descriptor)
        return
    for descriptor in (stdin, log, errors):
        os.close(descriptor)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _run_program(command: list[str], folder: str) -> None:
    os.chdir(folder)
    if command[0] == "-m":
        sys.path[0] = folder
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(command[0]).parent)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
