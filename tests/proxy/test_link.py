"""The line to the swarm server outlives whatever it hears."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fakevllm.ledger.store import Ledger
from fakevllm.swarm.link import SwarmLink
from fakevllm_adapters.swarm import TrainJob
from tests.proxy.odd_swarm import ROLLING, OddSwarm, until


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


@asynccontextmanager
async def following(swarm: OddSwarm, ledger: Ledger) -> AsyncGenerator[SwarmLink]:
    link = SwarmLink(swarm.url, None, TrainJob(), ledger)
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()


@pytest.mark.parametrize("answer", ["<html>hello</html>", [], {}, 500])
async def test_an_odd_answer_is_reported_once_and_outlived(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, answer: object
) -> None:
    caplog.set_level(logging.INFO, "fakevllm.link")
    async with OddSwarm() as swarm, following(swarm, ledger) as link:
        await link.reached.wait()
        assert link.status == ROLLING
        swarm.answers["/get_engine_status"] = answer
        heard = swarm.calls["/get_engine_status"]
        await until(lambda: swarm.calls["/get_engine_status"] >= heard + 4)
        assert link.status is None and not link.reached.is_set()
        swarm.answers["/get_engine_status"] = ROLLING
        await link.reached.wait()
        assert link.status == ROLLING
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "INFO"]
    assert all("\n" not in record.getMessage() for record in caplog.records)


class CountingLedger(Ledger):
    num_reads = 0

    def log_cursor(self, run_id: str) -> int:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        self.num_reads += 1
        if self.num_reads == 1:
            raise OSError("the disk is away")
        return super().log_cursor(run_id)


async def test_the_cursor_is_read_once_off_the_event_loop_and_its_trouble_is_outlived(
    tmp_path: Path,
) -> None:
    plain = Ledger.open(tmp_path / "ledger.sqlite")
    plain.__class__ = CountingLedger
    assert isinstance(plain, CountingLedger)
    async with OddSwarm() as swarm, following(swarm, plain) as link:
        await link.reached.wait()
        heard = swarm.calls["/get_run_log"]
        await until(lambda: swarm.calls["/get_run_log"] >= heard + 3)
    assert plain.num_reads == 2
    plain.close()
