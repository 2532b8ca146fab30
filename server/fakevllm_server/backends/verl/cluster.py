"""The Ray cluster in which the trainer's workers run: an existing cluster, or a private one."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fakevllm_server.backends.verl.session_cleanup import start_cleanup_process
from fakevllm_server.backends.verl.worker_placement import has_gpus, lost_nodes
from fakevllm_server.types.backend import BackendRefused

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 200 * 2**20
"""Size of Ray's object store if the workers train on CPUs. Only the batches of a small model pass
through the store."""
CPUS_PER_WORKER = 4
"""CPUs that a private cluster declares for each worker. verl reserves more CPUs than it uses."""
CONNECT_TIMEOUT_S = 10.0
NODE_TIMEOUT_S = 90.0
"""Maximum seconds that a node takes to import this project. Ray considers a node dead only some
time after it died, and tasks for this node wait until then."""
MAX_FOLDER_CHARS = 40
"""Maximum length of the path of the temporary folder. Ray adds 60 characters to this path for its
sockets, and the kernel allows 108 characters for a socket's path."""


class Cluster:
    """A connection to a Ray cluster.

    Create the object on a thread that lives as long as this process. The kernel ends a private
    cluster when the thread that started it ends. If some of the private cluster's processes
    continue to run, a separate cleanup process kills them.
    """

    def __init__(self, address: str | None, num_fake_gpus: int, env: Mapping[str, str]) -> None:
        """Connect to the Ray cluster at `address`, or start a private cluster if `address` is None.

        A private cluster declares `num_fake_gpus` GPUs, which do not exist. verl needs these
        declared GPUs to place workers on CPUs. The environment variables `env` are set in every
        worker. Raises BackendRefused if the cluster at `address` cannot be joined.
        """
        self.lost_nodes: list[str] = []
        """Addresses of the nodes that were dead or did not answer when the GPUs were counted."""
        self._folder: Path | None = None
        self._cleanup_process: subprocess.Popen[bytes] | None = None
        settings: dict[str, Any] = {
            "runtime_env": {"env_vars": dict(env)},
            "logging_level": logging.WARNING,
        }
        if address is None:
            self._folder = _short_temporary_folder()
            self._cleanup_process = start_cleanup_process(self._folder)
            settings |= _private_settings(self._folder, num_fake_gpus)
        else:
            _check_reachable(address)
        try:
            ray.init(address="local" if address is None else address, **settings)
        except (ConnectionError, RuntimeError) as error:
            if address is None:
                raise
            raise _cannot_join(address, error) from None

    @property
    def is_private(self) -> bool:
        return self._folder is not None

    def num_gpus_per_node(self) -> list[int]:
        """Return the number of GPUs of each node that has GPUs and that answers. Raises
        BackendRefused if a node cannot import the packages of a worker."""
        nodes = ray.nodes()
        num_gpus = {
            node["NodeID"]: int(node["Resources"]["GPU"]) for node in nodes if has_gpus(node)
        }
        answering = list(num_gpus) if self.is_private else _check_imports(list(num_gpus))
        self.lost_nodes = lost_nodes(nodes, answering)
        return [num_gpus[node] for node in answering]

    def num_local_gpus(self) -> int:
        """Return the number of GPUs of the Ray node on this machine."""
        own = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["NodeID"] == own and has_gpus(node)]
        return sum(int(node["Resources"]["GPU"]) for node in nodes)

    def close(self) -> None:
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _check_imports(nodes: Sequence[str]) -> list[str]:
    """Import the packages of a worker on the nodes with these IDs. Return the nodes that answer.
    Raises BackendRefused if a node cannot import the packages."""

    # Ray sends a nested function as code, so the node does not need this project to run it.
    def import_fault() -> str | None:
        import importlib

        try:
            for package in ("verl", "fakevllm_server"):
                importlib.import_module(package)
        except ImportError as error:
            return str(error)
        return None

    task = ray.remote(num_cpus=0, max_retries=0)(import_fault)
    replies: dict[Any, str] = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        replies[task.options(scheduling_strategy=strategy).remote()] = node
    if replies:
        ray.wait(list(replies), num_returns=len(replies), timeout=NODE_TIMEOUT_S)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    answered: list[str] = []
    for reply, node in replies.items():
        try:
            fault = ray.get(reply, timeout=0)
        # Isolated: the other nodes can train without a node that is dead or frozen.
        except RayError as error:
            reason = type(error).__name__
            print(f"Ray node {addresses[node]} is not used: {reason}", file=sys.stderr, flush=True)
            continue
        if fault is not None:
            raise BackendRefused(
                f"Ray node {addresses[node]} cannot import what a worker needs ({fault}): install "
                "this project on it with the extra `verl`, as on this machine, and start Ray there "
                "in that environment"
            )
        answered.append(node)
    return answered


def _check_reachable(address: str) -> None:
    """Check that a program listens at `address`. Without this check, Ray would try to connect for
    minutes. Raises BackendRefused if no program listens. Only addresses of the form `host:port` are
    checked."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:  # `auto`, or the address of a Ray client
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _cannot_join(address, error) from None


def _cannot_join(address: str, error: Exception) -> BackendRefused:
    return BackendRefused(
        f"the Ray cluster at {address} cannot be joined ({str(error).splitlines()[0]}): start it, "
        "set RAY_AUTH_MODE=token if it requires a token, or remove --ray-address and RAY_ADDRESS"
    )


def _private_settings(folder: Path, num_fake_gpus: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "include_dashboard": False,
        "_node_ip_address": LOOPBACK,
        "_temp_dir": str(folder),
        "num_cpus": max(os.cpu_count() or 1, CPUS_PER_WORKER * (num_fake_gpus + 1)),
    }
    if num_fake_gpus:
        settings |= {"num_gpus": num_fake_gpus, "object_store_memory": OBJECT_STORE_BYTES}
    return settings


def _short_temporary_folder() -> Path:
    root = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="fv-ray-", dir=root if len(root) < MAX_FOLDER_CHARS else "/tmp")
    )
