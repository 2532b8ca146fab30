"""The run of the tests of curves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.swarm_server.curves.charted_run import Run


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path / "run")
    await run.process.boot_trainer()
    yield run
    run.curves.close()
    run.process.close()
