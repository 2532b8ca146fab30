"""A fixture that starts a worker with a hook file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from fakevllm.hooks.hook_runner import HookWorker
from tests.proxy.hooks.hook_calls import Start


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that starts a worker with this text as its hook file."""
    workers: list[HookWorker] = []

    async def start_worker(text: str, timeout_s: float = 20.0) -> HookWorker:
        (tmp_path / "hook.py").write_text(text)
        worker = HookWorker(tmp_path, timeout_s)
        workers.append(worker)
        await worker.start()
        return worker

    yield start_worker
    for worker in workers:
        await worker.close()
