"""What the page Now says about the server, its engines and its clients."""

from __future__ import annotations

from typing import Any

from fakevllm.console.fleet_texts import (
    RECENT_START_S,
    UNKNOWN,
    client_rows,
    engine_rows,
    recent_start,
    server_rows,
)
from fakevllm.console.page_renderer import time_text
from fakevllm.console.sources.engine_loads import EngineLoad
from fakevllm.console.sources.server_status import ServerView
from fakevllm.overwatch.history import History
from fakevllm.overwatch.snapshot import build_snapshot
from fakevllm_adapters.protocol.batch_status import PoolInformation
from fakevllm_adapters.protocol.swarm import ReplicaStatus
from tests.proxy.overwatch.cases import NOW, URL, pool, status

AWAY = ServerView(URL, problem="No swarm server answers.")


def view(
    state: str = "ROLLING",
    loads: tuple[EngineLoad, ...] = (),
    batch: PoolInformation | None = None,
    **changes: Any,
) -> ServerView:
    reply = status(state, **changes)
    return ServerView(URL, reply, build_snapshot(URL, NOW, reply, batch, History()), loads)


def test_a_start_is_mentioned_for_some_minutes() -> None:
    started = view(started_at=NOW - 180.0)
    at = time_text(NOW - 180.0)
    assert recent_start(started, NOW) == f"The server was started 3 min ago, at {at}."
    assert recent_start(started, NOW + RECENT_START_S) == ""


def test_a_server_that_is_away_or_older_has_no_start() -> None:
    assert recent_start(AWAY, NOW) == recent_start(view(), NOW) == ""
    assert "started" not in dict(server_rows(view(), NOW))
    assert dict(server_rows(AWAY, NOW)) == {"address": URL}


def test_a_clock_that_is_behind_the_servers_shows_no_negative_time() -> None:
    assert "was started 0 s ago" in recent_start(view(started_at=NOW + 30.0), NOW)


def test_the_facts_name_the_start_the_engine_and_the_batch() -> None:
    rows = dict(server_rows(view(started_at=NOW - 7300, rollout="vllm", batch=pool()), NOW))
    assert rows["started"] == f"{time_text(NOW - 7300)}, 2.0 h ago"
    assert rows["engine"] == "vllm"
    assert rows["batch of step 13"] == "2 of 4 groups"
    apart = dict(server_rows(view(rollout="vllm", trainer="verl"), NOW))
    assert apart["engine"] == "vllm, trained by verl"
    one = dict(server_rows(view(rollout="embedded", trainer="embedded"), NOW))
    assert one["engine"] == "embedded"


def test_a_job_that_counts_answers_shows_the_number_of_answers() -> None:
    rows = dict(server_rows(view(batch=pool(completed_task_target=0)), NOW))
    assert rows["batch of step 13"] == "10 of 16 answers"


def test_what_keeps_the_server_from_training_is_a_fact() -> None:
    rows = dict(server_rows(view(closed="training_finished", claims_paused=True), NOW))
    assert "has taken its last step" in rows["training"]
    assert rows["claims of episodes"].startswith("paused")
    booting = pool(booting_start_time=NOW - 40.0)
    rows = dict(server_rows(view("BOOTING", batch=booting), NOW))
    assert rows["start of the engine"] == "takes 40 s so far"


def test_each_engine_is_a_row_with_its_load() -> None:
    loads = (EngineLoad("0", 3, 0), EngineLoad("1", 5, 2))
    rows = list(engine_rows(view(loads=loads)))
    assert [(row.name, row.version, row.running, row.waiting) for row in rows] == [
        ("engine 0", 12, "3", "0"),
        ("engine 1", 12, "5", "2"),
    ]
    assert rows[0].state == "serves requests (ROLLING)"


def test_each_replica_is_a_row_with_its_own_version_and_state() -> None:
    replicas = [
        ReplicaStatus(name="replica-0", state="serving", version=11, prefix_hit_share=0.75),
        ReplicaStatus(name="replica-1", state="starting", restarts=1, cause="it was killed"),
    ]
    loads = (EngineLoad("replica-0", 3, 2),)
    rows = list(engine_rows(view(loads=loads, replicas=replicas)))
    assert [(row.name, row.version, row.running, row.waiting) for row in rows] == [
        ("replica-0", 11, "0", "2"),
        ("replica-1", 0, "0", UNKNOWN),
    ]
    assert rows[0].state == "serving, prefix cache 75%"
    assert rows[1].state == "starting, it was killed, restarts: 1"


def test_an_engine_whose_load_is_unknown_is_one_row_and_an_engine_that_is_off_is_none() -> None:
    (row,) = engine_rows(view("WEIGHT_SYNCING"))
    assert (row.running, row.waiting) == (UNKNOWN, UNKNOWN)
    assert list(engine_rows(view("OFFLINE"))) == list(engine_rows(AWAY)) == []


def test_clients_have_their_episodes_and_their_last_activity() -> None:
    snapshot = view(batch=pool()).snapshot
    assert snapshot is not None
    rows = list(client_rows(snapshot.clients))
    assert len(rows) == len(snapshot.clients) > 0
    for client, (uuid, running, idle) in zip(snapshot.clients, rows, strict=True):
        assert (uuid, running) == (client.uuid, str(client.running))
        assert idle.endswith(" ago")
