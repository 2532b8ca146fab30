"""A Ray cluster of several nodes on this machine. Each node has one GPU that does not exist."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from contract.trainers import ray_workers

from fakevllm_server.backends.process.procfs import SESSION, live_processes
from tests.e2e.processes import free_port, wait_until

START_TIMEOUT_S = 120
OBJECT_STORE_BYTES = 100 * 2**20
RAY = Path(sys.executable).with_name("ray")


class RayNodes:
    """The running nodes, by their number. The node 1 is the head."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """Environment variables that every program needs to join the cluster."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def add(self, environ: dict[str, str] | None = None) -> int:
        """Start a node, wait until Ray is ready on it, and return its number. This is the lowest
        number that no running node has, so a killed node comes back at its old address. `environ`
        has further environment variables of the node."""
        number = next(number for number in count(1) if number not in self._nodes)
        command = [str(RAY), "start", "--block", f"--node-ip-address=127.0.0.{number}"]
        command += ["--num-gpus=1", "--num-cpus=8", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        if number == 1:
            command += ["--head", f"--port={self._port}", "--include-dashboard=false"]
            command += [f"--temp-dir={self._folder}", f"--ray-client-server-port={free_port()}"]
        else:
            command.append(f"--address={self.address}")
        own = {"GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"}
        log_file = self._folder / f"node_{number}.log"
        with log_file.open("wb") as log:
            node = subprocess.Popen(
                command,
                env=os.environ | self.environ | own | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._nodes[number] = node

        def is_ready() -> bool:
            text = log_file.read_text()
            assert node.poll() is None, text
            return "Ray runtime started" in text

        wait_until(is_ready, START_TIMEOUT_S, f"node {number} is ready")
        return number

    def worker(self, number: int) -> int:
        """Return the process id of the node's worker."""
        (worker,) = ray_workers(live_processes(SESSION, self._nodes[number].pid))
        return worker

    def kill(self, number: int) -> None:
        """Kill all processes of a node, as a power cut does."""
        node = self._nodes.pop(number)
        for process in live_processes(SESSION, node.pid):
            os.kill(process, signal.SIGKILL)
        node.wait()

    def close(self) -> None:
        for number, node in sorted(self._nodes.items(), reverse=True):
            if node.returncode is None:
                self.kill(number)


@contextmanager
def ray_nodes(num_nodes: int) -> Generator[RayNodes]:
    """Keep a cluster of nodes within the `with` block."""
    # Ray adds long names of sockets to this path.
    folder = Path(tempfile.mkdtemp(prefix="fv-nodes-", dir="/tmp"))
    nodes = RayNodes(folder)
    try:
        for _ in range(num_nodes):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
