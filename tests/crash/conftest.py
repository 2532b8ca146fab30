from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.fork_server import ForkServer

IN_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Start processes of the server whose weights list the calls that trained them."""
    with ForkServer("crash.server_process") as fork_server:
        yield fork_server


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Create an empty run directory, in memory if possible.

    The kernel keeps all writes of a killed process, even those that were not flushed. Therefore the
    tests need no real disk, whose flushes would take time.
    """
    parent = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fakevllm-crash-", dir=parent) as folder:
        yield Path(folder)
