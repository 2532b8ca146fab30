"""A journal in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm_server.journal import group_commit_writer
from fakevllm_server.journal.store import Journal

pytest.register_assert_rewrite("tests.swarm_server.journal.run_invariants")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setattr(group_commit_writer, "RETRY_S", 0.01)
    opened = Journal(path)
    yield opened
    opened.close()
