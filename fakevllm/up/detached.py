"""Starts `fakevllm up` in the background (`fakevllm up --detach`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from fakevllm.errors import FakevllmError, UserError
from fakevllm.processes.output import last_line
from fakevllm.processes.pid_file import down_command, running_message, running_pid
from fakevllm.processes.restart_policy import BAD_SETTINGS_CODE
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.up.log_lines import READY, standard_output
from fakevllm.up.programs import STOP_TIMEOUT_S
from fakevllm.up.settings import UpSettings
from fakevllm_runtime.path_access import unusable_message

LOG_NAME = "up.log"


def start_detached(settings: UpSettings) -> None:
    """Start `fakevllm up` in the background, and show its lines until all programs are ready.

    Raises UserError if the start fails because of a mistake of the user, and FakevllmError if it
    fails for another reason. After Ctrl-C, the background process is stopped.
    """
    output = standard_output()
    make_run_folder(settings.run_dir, "--run-dir")
    pid = running_pid(settings.run_dir)
    if pid is not None:
        raise UserError(running_message(settings.run_dir, pid))
    log_file = settings.run_dir / LOG_NAME
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "fakevllm", "up", "--ready-fd", str(write_end)]
    command += settings.proxy_flags
    with os.fdopen(read_end, "rb") as pipe:
        try:
            with _opened(log_file) as log:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[write_end],
                )
        finally:
            os.close(write_end)
        try:
            for line in pipe:
                if line == READY:
                    output.write(f"The log is {log_file}.")
                    output.write(f"To stop all: {down_command(settings.run_dir)}")
                    return
                output.write(line.decode(errors="replace").removesuffix("\n"))
            code = _wait(child, log_file)
        except KeyboardInterrupt:
            child.terminate()
            _wait(child, log_file)
            raise
        finally:
            output.join()
    if code == 0:
        raise FakevllmError(f"It was stopped before it was ready: see {log_file}.")
    kind = UserError if code == BAD_SETTINGS_CODE else FakevllmError
    message = (last_line(log_file) or "").removeprefix("fakevllm: ")
    raise kind(message or f"ended with exit code {code}: see {log_file}")


def _opened(log_file: Path) -> BinaryIO:
    try:
        # The log has the link that logs in to the console.
        fd = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        message = unusable_message(log_file, error, "choose another --run-dir")
        raise UserError(message) from None
    return os.fdopen(fd, "ab")


def _wait(child: subprocess.Popen[bytes], log_file: Path) -> int:
    """Wait for the end of the background process, and return its exit code."""
    try:
        return child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise FakevllmError(
            f"Process {child.pid} did not end within {STOP_TIMEOUT_S:.0f} s: see {log_file}."
        ) from None
