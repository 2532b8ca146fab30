"""Fixtures: real processes, a stack of processes, and a hooks folder that prefers "yes"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Processes
from tests.e2e.stack import Stack, running_stack

pytest.register_assert_rewrite("tests.e2e.journal_checks", "tests.e2e.stock_pair")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def yes_hooks(tmp_path: Path) -> Path:
    """A hooks folder that gives answers that begin with "yes" reward 1, and others 0."""
    return write_hooks(tmp_path / "hooks", PREFER_YES)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack
