import math
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from fakevllm_adapters.protocol.swarm import LogReply, TrainedGroup
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.log import RunLog
from fakevllm_server.web.routes.control import router
from fakevllm_server.web.server_state import ServerState


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[[], RunLog]]:
    """Return a function that closes the journal and opens it again."""
    opened: list[Journal] = []

    def opener() -> RunLog:
        for journal in opened:
            journal.close()
        opened[:] = [Journal(tmp_path / "journal.sqlite")]
        return RunLog(opened[0])

    yield opener
    for journal in opened:
        journal.close()


def group(name: str) -> TrainedGroup:
    return TrainedGroup(group_id=name, siblings=[0, 1])


async def test_entries_and_totals_are_the_same_after_a_restart(
    open_log: Callable[[], RunLog],
) -> None:
    log = open_log()
    await log.record_step(1, 1, [group("a")], {"loss": 0.5, "tokens_trained": 4.0})
    log.record_drops(2, {"b": "stale"})
    again = open_log()
    assert (again.version, again.last_step) == (1, 1)
    assert again.totals == {"tokens_trained": 4.0}
    assert [entry.kind for entry in again.entries_after(0)] == ["step", "dropped"]


async def test_a_rolled_back_step_is_not_in_the_totals_and_its_version_is_not_reused(
    open_log: Callable[[], RunLog],
) -> None:
    log = open_log()
    for step in (1, 2):
        await log.record_step(step, step, [group(str(step))], {"tokens_trained": 4.0})
    await log.record_rollback(1, 3)
    again = open_log()
    for one in (log, again):
        assert (one.version, one.last_step) == (3, 1)
        assert one.totals == {"tokens_trained": 4.0}
    await again.record_step(2, 4, [group("2")], {"tokens_trained": 5.0})
    assert again.totals == {"tokens_trained": 9.0}


async def test_a_reader_with_a_cursor_gets_each_entry_once(open_log: Callable[[], RunLog]) -> None:
    log = open_log()
    await log.record_step(1, 1, [group("a")], {})
    first = log.entries_after(0)
    assert [entry.kind for entry in first] == ["step"]
    assert log.entries_after(first[-1].seq) == []


async def test_only_the_owner_may_read_the_journal(
    open_log: Callable[[], RunLog], tmp_path: Path
) -> None:
    await open_log().record_step(1, 1, [], {})
    for file in tmp_path.glob("journal.sqlite*"):
        assert file.stat().st_mode & 0o777 == 0o600


async def test_infinite_and_nan_metrics_are_unchanged_after_a_restart(
    open_log: Callable[[], RunLog],
) -> None:
    odd = {"lr": 0.5, "grad_norm": math.inf, "ppo_kl": -math.inf, "loss": math.nan}
    await open_log().record_step(1, 1, [group("a")], odd)
    metrics = open_log().entries_after(0)[0].metrics
    assert math.isnan(metrics.pop("loss"))
    assert metrics == {"lr": 0.5, "grad_norm": math.inf, "ppo_kl": -math.inf}


async def test_infinite_and_nan_metrics_are_unchanged_over_http(tmp_path: Path) -> None:
    state = ServerState(ServerConfig("fake", tmp_path))
    await state.runlog.record_step(1, 1, [group("a")], {"loss": math.nan, "grad_norm": math.inf})
    app = FastAPI()
    app.include_router(router(state))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        (entry,) = LogReply.model_validate((await http.get("/get_run_log")).json()).entries

    assert math.isnan(entry.metrics["loss"]) and entry.metrics["grad_norm"] == math.inf
    await state.close()
