"""A worker on whatever hook a test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from fakevllm.hooks.worker import HookWorker
from tests.proxy.hooks.hook_calls import Start


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a worker on the given hook text."""
    workers: list[HookWorker] = []

    async def begin(text: str, timeout_s: float = 20.0) -> HookWorker:
        (tmp_path / "hook.py").write_text(text)
        worker = HookWorker(tmp_path, timeout_s)
        workers.append(worker)
        await worker.start()
        return worker

    yield begin
    for worker in workers:
        await worker.close()
