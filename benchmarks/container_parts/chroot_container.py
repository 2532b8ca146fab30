"""Run commands in the folder of an image as a container would.

A container has mount, process, network and IPC namespaces of its own. Its network is a loopback
device. Its user is that of the image, without any capability, as with Docker's `--cap-drop ALL
--security-opt no-new-privileges`. All mounts end with its process 1.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.container_parts.dockerfile import DEFAULT_PATH, ImageConfig

ROOT = Path(__file__).parents[2]
LOOPBACK_UP = ROOT / ".ci" / "loopback_up.py"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SHM_SIZE = "64m"
"""Size of Docker's /dev/shm."""
POLL_S = 0.2
EXIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine that the container sees."""

    source: Path
    target: str
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """The settings of a container, such as those that `docker run` takes."""

    mounts: tuple[Mount, ...] = ()
    environment: Mapping[str, str] | None = None
    has_shm: bool = True


class Container:
    """A running container. Leave the `with` block to end it."""

    def __init__(
        self,
        root: Path,
        config: ImageConfig,
        settings: ContainerSettings,
        command: Sequence[str],
        log: Path,
    ) -> None:
        self._root, self._config, self._settings = root, config, settings
        self.log = log
        script = "\n".join(("set -e", *_mount_lines(root, settings), 'exec "$@"'))
        namespaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
        with log.open("w") as output:
            self._unshare = subprocess.Popen(
                ["unshare", *namespaces, "sh", "-c", script, "sh", *self._inside(command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        """End process 1, and with it all others."""
        if self._unshare.poll() is None:
            try:
                self.send(signal.SIGKILL)
            except ProcessLookupError:  # it has not been forked yet, or has just ended
                self._unshare.kill()
        self._unshare.wait(EXIT_TIMEOUT_S)

    def run(
        self, command: Sequence[str], timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a further command in the container, as `docker exec` does."""
        namespaces = ("--mount", "--pid", "--net", "--ipc", "--uts")
        return subprocess.run(
            ["nsenter", f"--target={self._process_1()}", *namespaces, *self._inside(command)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to process 1."""
        os.kill(self._process_1(), number)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the container, and return the exit code of process 1."""
        return self._unshare.wait(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._unshare.poll() is None

    def _process_1(self) -> int:
        own = self._unshare.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        if not children:
            raise ProcessLookupError("The container has ended.")
        return int(children[0])

    def _inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` as the image's user in the chroot."""
        user, _, group = self._config.user.partition(":")
        environment = {"PATH": DEFAULT_PATH, **self._config.environment}
        environment |= self._settings.environment or {}
        folder = self._config.folder
        return [
            *("chroot", str(self._root), "setpriv"),
            *(f"--reuid={user}", f"--regid={group or user}", "--clear-groups"),
            *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"),
            *("env", "-i", f"--chdir={folder}"),
            *(f"{name}={value}" for name, value in environment.items()),
            *command,
        ]


def _mount_lines(root: Path, settings: ContainerSettings) -> list[str]:
    """Return the shell commands that make /proc, /dev, the loopback device and the mounts."""
    dev = root / "dev"
    lines = [
        f"{shlex.quote(sys.executable)} {shlex.quote(str(LOOPBACK_UP))}",
        f"mount -t proc proc {_quoted(root / 'proc')}",
        f"mount -t tmpfs -o mode=755 tmpfs {_quoted(dev)}",
        f"ln -s /proc/self/fd {_quoted(dev / 'fd')}",
    ]
    for name in DEVICES:
        device = _quoted(dev / name)
        lines += [f"touch {device}", f"mount --bind /dev/{name} {device}"]
    if settings.has_shm:
        shm = _quoted(dev / "shm")
        lines += [f"mkdir {shm}", f"mount -t tmpfs -o mode=1777,size={SHM_SIZE} tmpfs {shm}"]
    for mount in settings.mounts:
        target = _quoted(root / mount.target.lstrip("/"))
        make = "mkdir -p" if mount.source.is_dir() else "touch"
        lines += [f"{make} {target}", f"mount --bind {_quoted(mount.source)} {target}"]
        if mount.is_read_only:
            lines.append(f"mount -o remount,ro,bind {target}")
    return lines


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def wait_until_healthy(container: Container, command: Sequence[str], timeout_s: float) -> float:
    """Wait until the health check succeeds, and return the seconds that it took. Raises
    TimeoutError, or RuntimeError if the container ends."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if not container.is_running:
            raise RuntimeError(f"The container ended: {container.log.read_text()[-2000:]}")
        try:
            if container.run(command).returncode == 0:
                return time.monotonic() - started
        except ProcessLookupError:
            continue  # unshare has not forked yet, or the container is ending
        time.sleep(POLL_S)
    raise TimeoutError(f"The container was not healthy: {container.log.read_text()[-2000:]}")
