from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.nursery import Nursery

IN_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Of the server whose weights are the list of what trained them."""
    with Nursery("crash.life") as nursery:
        yield nursery


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """In memory where that can be had: a killed process leaves its writes to the kernel, flushed
    or not, so that no flush need be waited for."""
    where = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fakevllm-crash-", dir=where) as folder:
        yield Path(folder)
