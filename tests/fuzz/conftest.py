"""One loop and one set of servers for all examples of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest


@pytest.fixture(scope="module")
def loop() -> Generator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner
