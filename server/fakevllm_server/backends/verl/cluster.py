"""The Ray cluster the trainer's workers run in: one that is there, or a private one of its own."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from fakevllm_server.backends.verl.guard import start_guard
from fakevllm_server.types.backend import BackendRefused

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 200 * 2**20
"""On a CPU: batches of a small model pass through it, nothing else."""
CPUS_PER_WORKER = 4
"""What a private cluster declares, for verl reserves more than it uses."""
CONNECT_WITHIN_S = 10.0
MAX_FOLDER = 40
"""Ray puts sockets 60 characters below its folder, and the kernel allows 108 in all."""


class Cluster:
    """Open it on a thread that lives as long as the process: the kernel ends a private cluster
    with the thread that started it. What it does not end, the guard does."""

    def __init__(self, address: str | None, num_fake_gpus: int, env: Mapping[str, str]) -> None:
        """No `address` starts a private cluster. With `num_fake_gpus` it has no real ones. `env` is
        set in every worker."""
        self._folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        settings: dict[str, Any] = {
            "runtime_env": {"env_vars": dict(env)},
            "logging_level": logging.WARNING,
        }
        if address is None:
            self._folder = _short_temporary_folder()
            self._guard = start_guard(self._folder)
            settings |= _private(self._folder, num_fake_gpus)
        else:
            _check_answers(address)
        try:
            ray.init(address="local" if address is None else address, **settings)
        except (ConnectionError, RuntimeError) as error:
            if address is None:
                raise
            raise _not_joined(address, error) from None

    @property
    def is_private(self) -> bool:
        return self._folder is not None

    def num_gpus_per_node(self) -> list[int]:
        return [
            int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node.get("Alive", False)
        ]

    def close(self) -> None:
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _check_answers(address: str) -> None:
    """Ray itself would ask a dead address for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:  # `auto`, or a Ray client's
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_WITHIN_S).close()
    except OSError as error:
        raise _not_joined(address, error) from None


def _not_joined(address: str, error: Exception) -> BackendRefused:
    return BackendRefused(
        f"the Ray cluster at {address} cannot be joined ({str(error).splitlines()[0]}): start one, "
        "set RAY_AUTH_MODE=token where it asks for a token, or leave out --ray-address and "
        "RAY_ADDRESS"
    )


def _private(folder: Path, num_fake_gpus: int) -> dict[str, Any]:
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
    return Path(tempfile.mkdtemp(prefix="fv-ray-", dir=root if len(root) < MAX_FOLDER else "/tmp"))
