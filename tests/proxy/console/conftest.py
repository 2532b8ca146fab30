"""Fixtures: a ledger that the real writer fills, as the proxy does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm.ledger.store import Ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(path)
    yield opened
    opened.close()
