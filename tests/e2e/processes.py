"""Real processes of servers and proxies, started with their commands on free ports.

    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake")
        proxy = started.proxy(server, "--hooks", str(hooks), "--n", "2")
        httpx.get(f"{proxy.url}/v1/models")

At the end of the block the processes are stopped in reverse order, and the last lines of their logs
are printed. pytest shows these lines for tests that fail. Each process ends when its standard input
closes, so a killed test run leaves no process behind.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.e2e.preloaded_python import PRELOADED_PYTHON, ForkedProgram

START_TIMEOUT_S = 120.0
STOP_GRACE_S = 15.0
POLL_EVERY_S = 0.05
NUM_SHOWN_LINES = 60


class Process:
    """A Python program that answers /health and accepts `--until-stdin-closes`.

    `url` has no `/v1`. `folder` is the working directory, so that the repository's own
    configuration files are not read.
    """

    def __init__(self, name: str, command: Sequence[str], port: int, folder: Path) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        self.log_file = folder / f"{name}-{port}.log"
        folder.mkdir(parents=True, exist_ok=True)
        self._command = [*command, "--until-stdin-closes"]
        self._popen: ForkedProgram | subprocess.Popen[bytes]
        self.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> None:
        """Start the process; after `stop` or `kill`, again with the same port, folder and log."""
        with self.log_file.open("ab") as log:
            self._popen = PRELOADED_PYTHON.start(self._command, log, self.folder)

    def wait_until_healthy(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Wait until /health returns 200.

        A proxy returns 200 when the engine of its server answers.
        """

        def healthy() -> bool:
            assert self.returncode is None, f"{self.name} ended with {self.returncode}:\n{self.log}"
            return _status(f"{self.url}/health") == 200

        wait_until(healthy, timeout_s, lambda: f"{self.name} to be healthy; its log:\n{self.log}")
        return self

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def stop(self) -> int:
        """Send SIGTERM, wait for the end, and return the exit code.

        A negative code is the number of the signal that ended the process.
        """
        if self.returncode is None:
            self._popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_GRACE_S)
        return self.kill()

    def kill(self) -> int:
        """Send SIGKILL and return the exit code."""
        self._popen.kill()
        code = self._popen.wait(STOP_GRACE_S)
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        return code


class Processes:
    """The processes of one folder, which are stopped at the end of the `with` block.

    With `shows_logs`, the ends of their logs are printed then.
    """

    def __init__(self, folder: Path, *, shows_logs: bool = True) -> None:
        self.folder = folder
        self._shows_logs = shows_logs
        self._started: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in reversed(self._started):
            process.stop()
        if not self._shows_logs:
            return
        for file in sorted(self.folder.rglob("*.log")):  # includes the engines' logs
            lines = file.read_text(errors="replace").splitlines()[-NUM_SHOWN_LINES:]
            print(f"--- {file}", *lines, sep="\n")

    def server(self, *arguments: str, port: int | None = None, folder: str = "server") -> Process:
        """Run `fakevllm-server start`; the engine starts with the first proxy's job."""
        port = port or free_port()
        own = self.folder / folder
        command = [
            "-m",
            "fakevllm_server",
            "start",
            *arguments,
            "--port",
            str(port),
            "--run-dir",
            str(own),
        ]
        return self.adopt(Process("server", command, port, own)).wait_until_healthy()

    def proxy(
        self,
        server: Process | str,
        *arguments: str,
        port: int | None = None,
        folder: str = "proxy",
        wait: bool = True,
    ) -> Process:
        """Run `fakevllm serve` in front of a server or its URL.

        With `wait`, return when the proxy is healthy.
        """
        port = port or free_port()
        own = self.folder / folder
        url = server if isinstance(server, str) else server.url
        command = ["-m", "fakevllm", "serve", "--swarm", url, *arguments]
        command += ["--port", str(port), "--run-dir", str(own)]
        process = self.adopt(Process("proxy", command, port, own))
        return process.wait_until_healthy() if wait else process

    def adopt(self, process: Process) -> Process:
        """Stop `process` together with the others."""
        self._started.append(process)
        return process


def wait_until(
    condition: Callable[[], bool],
    timeout_s: float,
    awaited: str | Callable[[], str] = "the condition",
) -> None:
    """Poll the condition until it holds, or raise AssertionError after `timeout_s`.

    `awaited` describes the condition in the error.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            text = awaited if isinstance(awaited, str) else awaited()
            raise AssertionError(f"waited {timeout_s} s for {text}")
        time.sleep(POLL_EVERY_S)


def free_port() -> int:
    """Return a port for a server that starts a moment later.

    The port has a connection in TIME_WAIT. For a minute, the kernel does not give the port to a
    program that asks for any port, but a server may still listen on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        with socket.create_connection(probe.getsockname()), probe.accept()[0] as accepted:
            accepted.close()  # the end that closes first has the connection in TIME_WAIT
        return probe.getsockname()[1]


def _status(url: str) -> int | None:
    """Return the HTTP status, or None without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
