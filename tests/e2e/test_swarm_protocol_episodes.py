"""Conformance tests of claims, ends and aborts, written from the swarm protocol's description."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.processes import Processes, wait_until
from tests.e2e.swarm_wire import BOOT_S, ROLLING, Json, Wire, rolling, small_job, with_stock_job

NUM_CLIENTS = 64
POLICY = {
    "ratio": 1.5,
    "expected_batch_size": 32,
    "expected_num_repeat": 4,
    "current_task_id": "throttled",
}
TOO_LONG = (
    "Episode {} is not in claimed status, maybe you take **too long** to submit the workflow "
    "output, try increase `discard_episode_timeout` when `begin_episode`."
)


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with with_stock_job(tmp_path_factory.mktemp("episodes")) as wire:
        yield wire


@pytest.fixture
def claimed(wire: Wire) -> Iterator[Json]:
    claimed = wire.claim()
    yield claimed
    wire.abort(claimed["episode_uuid"])


def test_the_reply_to_a_claim_has_six_fields(wire: Wire, claimed: Json) -> None:
    assert claimed["success"] is True and claimed["fail_cause"] == ""
    assert claimed["client_uuid"] == wire.client_uuid
    uuid = claimed["episode_uuid"]
    assert claimed["openai_base_url"].endswith(f"/e/{uuid}/v1")
    assert uuid and claimed["openai_api_key"]


def test_an_unknown_type_of_episode_is_refused_with_400(wire: Wire) -> None:
    refused = wire.refused("/claim_episode", wire.claim_body(episode_type="magic"))
    assert refused == (400, "Unknown episode_type: magic")


def test_a_throttle_policy_may_be_absent_null_or_complete(wire: Wire) -> None:
    bodies: list[Json] = [wire.claim_body(), wire.claim_body(throttle_policy=POLICY)]
    bodies.append({key: value for key, value in bodies[0].items() if key != "throttle_policy"})
    for body in bodies:
        answer = wire.post("/claim_episode", body)
        assert answer["success"] is True
        assert wire.abort(answer["episode_uuid"]) == {"success": True}


def test_an_end_is_acknowledged_with_success_only(wire: Wire) -> None:
    claimed = wire.claim()
    wire.chat(claimed)
    assert wire.end(claimed["episode_uuid"], "acknowledged") == {"success": True}
    assert not wire.can_continue(claimed["episode_uuid"])


def test_unknown_fields_of_newer_clients_are_ignored(wire: Wire) -> None:
    claimed = wire.claim(newer="member")
    wire.chat(claimed)
    body = wire.end_body(claimed["episode_uuid"], "newer", another=1)
    assert wire.post("/end_episode", body) == {"success": True}


def test_an_end_whose_task_differs_from_its_outputs_is_refused(wire: Wire, claimed: Json) -> None:
    body = wire.end_body(claimed["episode_uuid"], "mine")
    for metadata in ({}, {"task_id": "another"}):
        body["workflow_output"]["metadata"] = metadata
        code, detail = wire.refused("/end_episode", body)  # the public server: 500
        assert code == 400 and "task_id" in detail
    assert wire.can_continue(claimed["episode_uuid"])


def test_an_end_of_an_unknown_episode_is_refused(wire: Wire) -> None:
    refused = wire.refused("/end_episode", wire.end_body("f" * 32, "t"))
    assert refused == (400, f"Episode {'f' * 32} not found.")


def test_another_clients_end_and_abort_change_nothing(wire: Wire, claimed: Json) -> None:
    uuid = claimed["episode_uuid"]
    with Wire(wire.url) as other:
        assert other.refused("/end_episode", other.end_body(uuid, "t")) == (
            404,
            f"Episode {uuid} is claimed by different client: {wire.client_uuid}, but got "
            f"{other.client_uuid}.",
        )
        assert other.abort(uuid) == {"success": True}
    assert wire.can_continue(uuid) and wire.chat(claimed).status_code == 200


def test_an_episode_that_was_aborted_cannot_be_ended(wire: Wire) -> None:
    claimed = wire.claim()
    uuid = claimed["episode_uuid"]
    assert wire.abort(uuid) == wire.abort(uuid) == {"success": True}
    assert not wire.can_continue(uuid)
    assert wire.refused("/end_episode", wire.end_body(uuid, "t")) == (400, TOO_LONG.format(uuid))


def test_an_abort_always_succeeds(wire: Wire) -> None:
    assert wire.abort("f" * 32) == {"success": True}


def test_a_claim_without_a_call_expires_with_a_reason(wire: Wire) -> None:
    claimed = wire.claim(discard_episode_timeout=0.2)
    uuid = claimed["episode_uuid"]
    wait_until(lambda: not wire.can_continue(uuid), 60)
    assert wire.refused("/end_episode", wire.end_body(uuid, "t")) == (400, TOO_LONG.format(uuid))
    assert wire.chat(claimed).status_code == 404


def test_an_unknown_episode_cannot_be_continued(wire: Wire) -> None:
    assert wire.can_continue("f" * 32) is False


def test_an_eval_episode_is_in_no_batch(wire: Wire) -> None:
    claimed = wire.claim(episode_type="eval")
    assert wire.chat(claimed).status_code == 200
    assert wire.end(claimed["episode_uuid"], "eval task", 0.5) == {"success": True}
    assert "eval task" not in wire.pool()["completed_tasks_details"]


def test_the_details_of_running_episodes_are_strings(wire: Wire) -> None:
    claimed = wire.claim(throttle_policy=POLICY)
    uuid = claimed["episode_uuid"]
    wire.chat(claimed)
    details = wire.pool()["running_episode_details"][uuid]
    assert (
        details.items()
        >= {
            "episode_status": "claimed",
            "discard_episode_timeout": "240.0s",
            "llm_call_count": "1",
            "client_uuid": wire.client_uuid,
            "optional_task_id": "throttled",
        }.items()
    )
    assert details["time_since_last_activity"].endswith("s")
    float(details["time_since_last_activity"].removesuffix("s"))
    (live,) = wire.post("/get_episode_buffer")["buffer"]
    assert live["optional_task_id"] == "throttled"
    wire.end(uuid, "throttled")
    pool = wire.pool()
    assert pool["completed_tasks_details"]["throttled"] == [uuid]
    assert pool["completed_tasks_rewards"]["throttled"] == [1.0]
    assert pool["completed_tasks_client_uuids"]["throttled"] == [wire.client_uuid]


def test_the_buffer_lists_claimed_episodes_without_their_keys(wire: Wire, claimed: Json) -> None:
    buffer = wire.post("/get_episode_buffer")["buffer"]
    (entry,) = [entry for entry in buffer if entry["episode_uuid"] == claimed["episode_uuid"]]
    kinds: dict[str, Any] = {
        "episode_status": str,
        "episode_type": str,
        "openai_base_url": str,
        "openai_api_key": str,
        "client_uuid": str,
        "zmq_listen_result_addr": str,
        "latest_activity_timestamp": float,
        "discard_episode_timeout": float,
        "llm_call_count": int,
        "debug_log": list,
        "optional_task_id": str,
    }
    assert {name for name, kind in kinds.items() if not isinstance(entry[name], kind)} == set()
    assert (entry["episode_status"], entry["episode_type"]) == ("claimed", "train")
    assert claimed["openai_api_key"] not in str(buffer)


def test_many_clients_run_episodes_at_once(wire: Wire) -> None:
    def play(number: int) -> str:
        with Wire(wire.url) as me:
            claimed = me.claim()
            assert me.get("/get_engine_status")["engine_status"] == ROLLING
            answer = me.chat(claimed, f"[[say {number}]]").json()
            assert answer["choices"][0]["message"]["content"] == str(number)
            assert me.end(claimed["episode_uuid"], f"many {number}") == {"success": True}
        return claimed["episode_uuid"]

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        uuids = list(clients.map(play, range(NUM_CLIENTS)))
    assert len(set(uuids)) == NUM_CLIENTS


@pytest.fixture
def small(processes: Processes) -> Iterator[Wire]:
    with rolling(processes.server("--backend", "fake"), small_job(batch_size=1)) as wire:
        yield wire


def test_no_more_episodes_than_slots_can_be_claimed(small: Wire) -> None:
    first = small.claim()
    small.claim()
    refused = small.post("/claim_episode", small.claim_body())
    assert refused["success"] is False
    known = "No available episodes to claim. Try again (maybe 1 minute) later."
    assert refused["fail_cause"].startswith(known)  # AgentJet's client looks for these words
    small.abort(first["episode_uuid"])
    small.claim()


def test_a_full_batch_waits_for_claimed_episodes_and_refuses_new_claims(small: Wire) -> None:
    episodes = [small.claim(), small.claim()]
    for claimed in episodes:
        small.chat(claimed)
    small.end(episodes[0]["episode_uuid"], "t", 1.0)
    late = small.claim()
    small.end(episodes[1]["episode_uuid"], "t", 0.0)
    wait_until(lambda: small.status == "ENGINE.ROLLING_POST", BOOT_S)
    refused = small.post("/claim_episode", small.claim_body())
    assert refused["success"] is False and refused["fail_cause"] == (
        "Engine not ready. Current status: [ENGINE.ROLLING_POST]. Engine is in post-rolling "
        "phase. Try again (maybe 1 minute) later."
    )
    assert small.can_continue(late["episode_uuid"])
    before = small.get("/get_engine_status")["global_step"]
    assert small.chat(late).status_code == 200
    assert small.end(late["episode_uuid"], "u", 1.0) == {"success": True}
    wait_until(lambda: small.status == ROLLING, BOOT_S)
    assert small.get("/get_engine_status")["global_step"] == before + 1


def test_an_offline_engine_refuses_ends_and_calls(small: Wire) -> None:
    claimed = small.claim()
    small.post("/stop_engine")
    body = small.end_body(claimed["episode_uuid"], "t")
    assert small.refused("/end_episode", body) == (
        400,
        "Engine is not in rolling state. Current status: [ENGINE.OFFLINE]. Cannot end episode.",
    )
    assert small.abort(claimed["episode_uuid"]) == {"success": True}
    late = small.chat(claimed)  # the public server: 404
    assert late.status_code == 503 and late.headers["retry-after"]
