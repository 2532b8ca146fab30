"""The real processes, started as a user would start them, on free ports and in one folder.

    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake")
        proxy = started.proxy(server, "--hooks", str(hooks), "--n", "2")
        httpx.get(f"{proxy.url}/v1/models")

Leaving the block stops all of them, in reverse, and prints the ends of their logs: pytest shows
these for tests that fail. They hold the other end of a pipe of ours, so a killed test run leaves
none behind either.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 45.0
STOP_GRACE_S = 15.0
POLL_EVERY_S = 0.05
NUM_SHOWN_LINES = 60


class Process:
    """One of ours, or any Python program that answers /health and knows `--until-stdin-closes`.

    `url` has no `/v1`; `folder` is where it runs, apart from any fakevllm.toml of the repository.
    """

    def __init__(self, name: str, command: Sequence[str], port: int, folder: Path) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        self.log_file = folder / f"{name}-{port}.log"
        folder.mkdir(parents=True, exist_ok=True)
        self._command = [sys.executable, *command, "--until-stdin-closes"]
        self._popen: subprocess.Popen[bytes]
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
        """Also once more after `stop` or `kill`: same port, same folder, same log."""
        with self.log_file.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def wait_until_healthy(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Until /health is 200. The proxy's is when its server's engine answers."""

        def healthy() -> bool:
            assert self.returncode is None, f"{self.name} ended with {self.returncode}:\n{self.log}"
            return _status(f"{self.url}/health") == 200

        wait_until(healthy, timeout_s, lambda: f"{self.name} to be healthy; its log:\n{self.log}")
        return self

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def stop(self) -> int:
        """As Ctrl-C or a service manager would. The exit code; negative is a signal's number."""
        if self.returncode is None:
            self._popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_GRACE_S)
        return self.kill()

    def kill(self) -> int:
        """At once, as the kernel would."""
        self._popen.kill()
        code = self._popen.wait(STOP_GRACE_S)
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        return code


class Processes:
    """What runs in one folder. All of it ends with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        for file in sorted(self.folder.rglob("*.log")):  # the engines' own are among them
            lines = file.read_text(errors="replace").splitlines()[-NUM_SHOWN_LINES:]
            print(f"--- {file}", *lines, sep="\n")

    def server(self, *arguments: str, port: int | None = None, folder: str = "server") -> Process:
        """`fakevllm-server start`. Its engine starts with the first proxy's job."""
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
        """`fakevllm serve` before a server or its URL; without `wait` it is only started."""
        port = port or free_port()
        own = self.folder / folder
        url = server if isinstance(server, str) else server.url
        command = ["-m", "fakevllm", "serve", "--swarm", url, *arguments]
        command += ["--port", str(port), "--run-dir", str(own)]
        process = self.adopt(Process("proxy", command, port, own))
        return process.wait_until_healthy() if wait else process

    def adopt(self, process: Process) -> Process:
        """Ends `process` with the others."""
        self._started.append(process)
        return process


def wait_until(
    condition: Callable[[], bool],
    timeout_s: float,
    what: str | Callable[[], str] = "the condition",
) -> None:
    """Looks again and again. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {timeout_s} s for {told}")
        time.sleep(POLL_EVERY_S)


def free_port() -> int:
    """For a server that starts a moment later: a connection that was closed on it keeps the port
    from whoever asks for any port, for a minute, and a server may listen on it all the same."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        with socket.create_connection(probe.getsockname()), probe.accept()[0] as accepted:
            accepted.close()  # first, for the end that closes first is the one that waits
        return probe.getsockname()[1]


def _status(url: str) -> int | None:
    """None where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
