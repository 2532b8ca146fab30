"""Conformance tests of the swarm protocol's control plane: state, jobs, start, stop, pool.

The tests are written from the protocol's description only. They share one server, and the fixtures
`offline` and `online` bring its engine into the state that a test needs.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.processes import Processes, wait_until
from tests.e2e.swarm_wire import BOOT_S, OFFLINE, ROLLING, Json, Wire, small_job, stock_job

NAMES = {"OFFLINE", "BOOTING", "ROLLING", "ROLLING_POST", "WEIGHT_SYNCING", "WEIGHT_EXPORTING"}
AGREE_JOB = small_job(
    ajet__swarm_mode_sample_collection_method="rollout_until_any_client_agree_sync_weight"
)
ALREADY = "Engine is already started. Call `stop_engine` first before syncing new training "


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with (
        Processes(tmp_path_factory.mktemp("control")) as started,
        Wire(started.server("--backend", "fake", "--keep-latest-call").url) as wire,
    ):
        yield wire


@pytest.fixture
def offline(wire: Wire) -> Wire:
    wire.post("/stop_engine")
    wait_until(lambda: wire.status == OFFLINE, BOOT_S)
    return wire


@pytest.fixture
def online(wire: Wire) -> Wire:
    if wire.status == OFFLINE:
        wire.start(stock_job())
    return wire


def test_a_server_without_a_job_does_not_start_its_engine(wire: Wire) -> None:
    answer = wire.post("/start_engine")
    assert answer["success"] is False and answer["error"] == "No training config found"
    assert wire.post("/stop_engine") == {"success": True, "failure_reason": ""}
    assert wire.status == OFFLINE


def test_before_the_first_call_there_is_no_latest_call(wire: Wire) -> None:
    assert wire.refused("/replay_latest_llm_call") == (404, "No LLM call has been made yet")


def test_health_and_status_have_the_fields_that_clients_read(offline: Wire) -> None:
    assert offline.get("/health") == {"status": "ok"}
    status = offline.get("/get_engine_status")
    assert status["engine_status"] == OFFLINE
    assert isinstance(status["engine_status_detail"], str | None)
    assert isinstance(status["global_step"], int | None)


def test_a_claim_at_an_offline_engine_is_refused_with_the_way_to_start_it(offline: Wire) -> None:
    refused = offline.post("/claim_episode", offline.claim_body(episode_type="magic"))
    assert refused["success"] is False  # the state is checked before the type
    assert refused["fail_cause"] == (
        "Engine not ready. Current status: [ENGINE.OFFLINE]. Please start the engine first. Please "
        "use one of the client to run `client.sync_train_config() + client.start_engine()` to "
        "start the engine."
    )
    strings = ("client_uuid", "episode_uuid", "openai_base_url", "openai_api_key")
    assert all(isinstance(refused[name], str) for name in strings)


def test_an_engine_is_not_offline_again_between_its_start_and_rolling(offline: Wire) -> None:
    offline.sync(stock_job())
    started = offline.post("/start_engine")
    assert started["success"] is True and isinstance(started["pid"], int)
    statuses: list[str] = []

    def rolls() -> bool:
        statuses.append(offline.status)
        return statuses[-1] == ROLLING

    wait_until(rolls, BOOT_S)
    assert {name.removeprefix("ENGINE.") for name in statuses} <= NAMES - {"OFFLINE"}
    assert offline.get("/get_engine_status")["global_step"] is not None


def test_the_engine_starts_with_the_job_that_was_synced_last(offline: Wire) -> None:
    offline.sync(small_job(batch_size=7))
    offline.sync(small_job(batch_size=3))
    offline.start(small_job(batch_size=5, num_repeat=2))
    pool = offline.pool()
    assert (pool["completed_task_target"], pool["task_expected_num_repeat"]) == (5, 2)


def test_a_running_engine_refuses_a_job_and_a_second_start(online: Wire) -> None:
    job = {"yaml_as_string": stock_job()}
    assert online.refused("/sync_train_config", job) == (400, f"{ALREADY}configuration.")
    code, detail = online.refused("/start_engine")
    expected = "Cannot start engine when engine is not offline. Current status: ENGINE.ROLLING"
    assert code == 400 and detail.removesuffix(".") == expected


def test_training_code_is_refused(online: Wire) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("ajet/__init__.py", "")
    sent = online.http.post(
        "/sync_train_code",
        content=packed.getvalue(),
        headers={"Content-Type": "application/zip"},
    )
    assert sent.status_code == 403 and isinstance(sent.json()["detail"], str)


def test_a_body_without_a_required_field_is_refused_with_422(online: Wire) -> None:
    for path in ("/sync_train_config", "/claim_episode", "/end_episode", "/abort_episode"):
        assert online.send(path).status_code == 422, path


def test_the_server_names_its_experiment_directory(online: Wire) -> None:
    assert isinstance(online.get("/get_server_experiment_dir")["server_experiment_dir"], str)


def test_stopping_discards_all_episodes_and_always_succeeds(online: Wire) -> None:
    claimed = online.claim()
    assert online.post("/stop_engine") == {"success": True, "failure_reason": ""}
    wait_until(lambda: online.status == OFFLINE, BOOT_S)
    assert online.post("/get_episode_buffer") == {"buffer": []}
    assert not online.can_continue(claimed["episode_uuid"])
    assert online.post("/stop_engine") == {"success": True, "failure_reason": ""}


POOL: Json = {
    "sample_collection_method": str,
    "completed_episodes": int,
    "completed_episode_target": int,
    "completed_tasks": int,
    "completed_task_target": int,
    "completed_non_dummy_tasks": int,
    "completed_non_dummy_task_target": int,
    "task_expected_num_repeat": int,
    "completed_tasks_details": (dict,),
    "completed_tasks_rewards": (dict,),
    "running_episode_details": (dict, type(None)),
    "engine_status": str | None,
    "global_step": int | None,
    "booting_start_time": float | int | None,
    "completed_tasks_client_uuids": (dict,),
    "training_model_path": str | None,
    "swarm_client_instruction": (dict, type(None)),
}


def test_the_pools_statistics_are_available_in_every_state(offline: Wire) -> None:
    offline_pool = offline.pool()
    offline.start(stock_job())
    online_pool = offline.pool()
    for pool in (offline_pool, online_pool):
        assert {
            name: pool[name] for name, kind in POOL.items() if not isinstance(pool[name], kind)
        } == {}
    assert (
        online_pool["running_episode_details"] is None
    )  # not {}: AgentJet's client distinguishes the two
    assert online_pool["sample_collection_method"] == "rollout_until_finish_enough_tasks"
    assert (
        online_pool["completed_task_target"] == 32
        and online_pool["completed_episode_target"] == 128
    )


def test_verbose_log_entries_are_available_to_all_clients(online: Wire) -> None:
    reply = online.post("/push_verbose_log", {"tag": "mine", "message": "hello"})
    assert reply["success"] is True and reply["failure_reason"] == ""
    assert online.post("/push_verbose_log")["success"] is True
    entries = [note for note in online.get("/get_verbose_logs")["entries"] if note["tag"] == "mine"]
    assert entries[-1]["message"] == "hello" and isinstance(entries[-1]["timestamp"], float)


def test_only_active_clients_may_agree_and_only_if_the_job_demands_agreement(offline: Wire) -> None:
    offline.start(stock_job())
    me = {"client_uuid": offline.client_uuid}
    code, detail = offline.refused("/agree_sync_weight", me)  # the public server: 500
    assert code == 400 and "rollout_until_finish_enough_tasks" in detail
    offline.post("/stop_engine")
    wait_until(lambda: offline.status == OFFLINE, BOOT_S)
    offline.start(AGREE_JOB)
    nameless = offline.post("/agree_sync_weight", {"client_uuid": ""})
    assert nameless == {"success": False, "failure_reason": "client_uuid required"}
    assert offline.post("/agree_sync_weight", me)["failure_reason"] == (
        f"Client {offline.client_uuid} is not in the active list -- it must have completed at "
        "least one rewarded (non-abort) episode since the last weight sync before agreeing."
    )
    claimed = offline.claim()
    assert offline.chat(claimed).status_code == 200
    offline.end(claimed["episode_uuid"], "t")
    assert offline.post("/agree_sync_weight", me) == {"success": True, "failure_reason": ""}
    wait_until(lambda: offline.status == "ENGINE.ROLLING_POST", BOOT_S)
    offline.post("/stop_engine")
    assert offline.status == OFFLINE  # although ROLLING_POST is shown for longer than a step takes


TRAINER_ROUTES = {
    "/register_episode": {"episode_uuid": "0" * 32, "zmq_listen_result_addr": "ipc://x"},
    "/is_episode_claimed": {"episode_uuid": "0" * 32, "unregister_if_not_claimed": True},
    "/update_engine_status": {"engine_status": OFFLINE},
    "/update_current_batch_rollout_pool_information": {"completed_tasks": 7},
    "/update_current_batch_rollout_pool_information_and_fetch_instruction": {"completed_tasks": 7},
}


@pytest.mark.parametrize("path", TRAINER_ROUTES)
def test_the_routes_for_trainers_refuse_in_the_protocols_format(online: Wire, path: str) -> None:
    for body in (TRAINER_ROUTES[path], {}):
        answer = online.post(path, body)
        assert answer["success"] is False and answer["failure_reason"].startswith(path)
    assert online.status == ROLLING and online.pool()["completed_tasks"] == 0


def test_a_client_can_poll_over_one_connection(online: Wire) -> None:
    with httpx.Client(base_url=online.url) as polls:
        streams = [polls.get("/get_engine_status").extensions["network_stream"] for _ in range(20)]
        assert len({stream.get_extra_info("client_addr") for stream in streams}) == 1
