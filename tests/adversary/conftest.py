"""Fixtures: real processes, and a hooks folder that prefers "yes"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def yes_hooks(tmp_path: Path) -> Path:
    """A hooks folder that gives answers that begin with "yes" reward 1, and others 0."""
    return write_hooks(tmp_path / "hooks", PREFER_YES)
