import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from fakevllm_adapters.swarm import LogReply, TrainedGroup
from fakevllm_server.api.control import router
from fakevllm_server.config import ConfigError, ServerConfig
from fakevllm_server.runlog import RunLog
from fakevllm_server.swarm import Swarm


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[[], RunLog]]:
    """Opens the same file, as often as asked."""
    opened: list[RunLog] = []

    def opener() -> RunLog:
        opened.append(RunLog(tmp_path / "log"))
        return opened[-1]

    yield opener
    for log in opened:
        log.close()


def group(name: str) -> TrainedGroup:
    return TrainedGroup(group_id=name, siblings=[0, 1])


def test_what_was_written_stands_when_the_file_is_opened_again(
    open_log: Callable[[], RunLog],
) -> None:
    log = open_log()
    for name in "abc":
        log.acked(name, step=1)
    log.trained(1, 1, [group("a")], {"loss": 0.5})
    log.dropped(2, {"b": "stale"})
    again = open_log().standing
    assert again.pending == {"c"}
    assert again.trained == {"a": 1}
    assert again.gone == {"b": "stale"}
    assert (again.version, again.last_step) == (1, 1)


def test_a_restore_moves_what_was_trained_since_to_lost(open_log: Callable[[], RunLog]) -> None:
    log = open_log()
    for step, name in enumerate("ab", start=1):
        log.acked(name, step)
        log.trained(step, step, [group(name)], {})
    lost = log.standing.trained_after(1)
    log.restored(1, 3, lost)
    assert lost == {"b"}
    assert log.standing.trained == {"a": 1}
    assert log.standing.gone == {"b": "lost_in_crash"}
    assert log.standing.version == 3


def test_a_torn_last_line_is_cut_off_and_its_number_used_again(
    open_log: Callable[[], RunLog], tmp_path: Path
) -> None:
    log = open_log()
    log.acked("a", 1)
    log.close()
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"seq": 2, "kind": "ac')
    log = open_log()
    log.dropped(1, {"a": "stale"})
    again = open_log()
    assert again.standing.gone == {"a": "stale"}
    assert [entry.seq for entry in again.after(0)] == [2]


def test_readers_see_each_entry_once_by_its_number(open_log: Callable[[], RunLog]) -> None:
    log = open_log()
    log.acked("a", 1)
    log.trained(1, 1, [group("a")], {})
    first = log.after(0)
    assert [entry.kind for entry in first] == ["step"]
    assert log.after(first[-1].seq) == []


def test_only_the_owner_may_read_the_log(open_log: Callable[[], RunLog], tmp_path: Path) -> None:
    open_log().acked("a", 1)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_metrics_that_are_not_finite_are_told_as_they_are_at_the_next_start_too(
    open_log: Callable[[], RunLog], tmp_path: Path
) -> None:
    odd = {"lr": 0.5, "grad_norm": math.inf, "ppo_kl": -math.inf, "loss": math.nan}
    open_log().trained(1, 1, [group("a")], odd)

    again = open_log().after(0)
    shown = again[0].metrics
    assert math.isnan(shown.pop("loss"))
    assert shown == {"lr": 0.5, "grad_norm": math.inf, "ppo_kl": -math.inf}
    assert json.loads((tmp_path / "log").read_text())["metrics"]["loss"] == "NaN"


async def test_a_reader_of_the_log_over_http_gets_them_as_they_are(tmp_path: Path) -> None:
    swarm = Swarm(ServerConfig("fake", tmp_path))
    swarm.runlog.trained(1, 1, [group("a")], {"loss": math.nan, "grad_norm": math.inf})
    app = FastAPI()
    app.include_router(router(swarm))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        (entry,) = LogReply.model_validate((await http.get("/get_run_log")).json()).entries

    assert math.isnan(entry.metrics["loss"]) and entry.metrics["grad_norm"] == math.inf
    await swarm.close()


def test_a_server_refuses_its_own_log_where_it_does_not_know_a_kind(
    open_log: Callable[[], RunLog], tmp_path: Path
) -> None:
    (tmp_path / "log").write_bytes(b'{"seq": 1, "kind": "divided"}\n')
    with pytest.raises(ConfigError, match="line 1, is no entry"):
        open_log()


def test_a_null_metric_of_an_older_log_is_left_out(
    open_log: Callable[[], RunLog], tmp_path: Path
) -> None:
    line = b'{"seq": 1, "kind": "step", "step": 1, "metrics": {"reward_mean": null, "loss": 1.0}}\n'
    (tmp_path / "log").write_bytes(line)
    assert open_log().after(0)[0].metrics == {"loss": 1.0}
