"""Tests of the routes that show the current batch to clients, and of the clients' agreement."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from fakevllm import SwarmClient, Task, ThrottlePolicy, TrainJob, WorkflowOutput
from fakevllm.sdk.types import SwarmError
from tests.e2e.processes import Processes, wait_until

ALL_CLIENTS_AGREE = "rollout_until_all_clients_agree_sync_weight"
WAIT_S = 20.0


@contextmanager
def client_of(processes: Processes, **job: Any) -> Generator[SwarmClient]:
    server = processes.server("--backend", "fake")
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(TrainJob(lr=0.5, **job))
        yield client


def end(client: SwarmClient, task: str, reward: float, policy: ThrottlePolicy | None = None) -> str:
    uuid, access = client.begin_episode(throttle_policy=policy)
    with access.openai() as app:
        app.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    client.end_episode(Task(task_id=task), uuid, WorkflowOutput(reward=reward))
    return uuid


def test_the_current_batch_is_shown_task_by_task(processes: Processes) -> None:
    with client_of(processes, batch_size=2, num_repeat=2) as client:
        empty = client.get_rollout_stat()
        assert empty.running_episode_details is None and empty.engine_status == "ENGINE.ROLLING"
        policy = ThrottlePolicy(current_task_id="t")
        uuids = [end(client, "t", 1.0, policy), end(client, "t", 0.0), end(client, "half", 0.5)]
        running, _ = client.begin_episode(discard_episode_timeout=60, throttle_policy=policy)
        stat = client.get_rollout_stat()
        assert (stat.completed_episodes, stat.completed_episode_target) == (3, 4)
        assert (stat.completed_tasks, stat.completed_task_target) == (1, 2)
        assert stat.completed_non_dummy_tasks == 1 and stat.task_expected_num_repeat == 2
        assert stat.completed_tasks_details == {"t": uuids[:2], "half": uuids[2:]}
        assert stat.completed_tasks_rewards == {"t": [1.0, 0.0], "half": [0.5]}
        assert stat.completed_tasks_client_uuids == {"t": [client.client_uuid]}
        assert stat.running_episode_details is not None
        shown = stat.running_episode_details[running]
        assert shown["episode_status"] == "claimed" and shown["optional_task_id"] == "t"
        assert shown["discard_episode_timeout"] == "60.0s" and shown["llm_call_count"] == "0"
        assert stat.swarm_client_instruction is not None
        (active,) = stat.swarm_client_instruction["active_clients"]
        assert active["client_uuid"] == client.client_uuid and not active["allowed_sync_weight"]
        client.print_rollout_stat()


def test_no_more_episodes_can_be_claimed_at_once_than_the_batch_allows(
    processes: Processes,
) -> None:
    with client_of(processes, batch_size=8, num_repeat=2, max_env_worker=5) as client:
        for _ in range(4):
            client.begin_episode()
        refused = _claim(client)
        assert not refused["success"]
        assert refused["fail_cause"].startswith("No available episodes to claim. Try again")


def _claim(client: SwarmClient, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    body = {"client_uuid": client.client_uuid, "episode_type": "train", "throttle_policy": policy}
    return httpx.post(f"{client.server_url}/claim_episode", json=body).json()


def test_a_step_waits_until_all_active_clients_agree(processes: Processes) -> None:
    with (
        client_of(
            processes,
            batch_size=99,
            num_repeat=2,
            swarm_mode_sample_collection_method=ALL_CLIENTS_AGREE,
        ) as mine,
        SwarmClient(mine.server_url) as other,
    ):
        for reward in (0.0, 1.0):
            end(mine, "t", reward)
            end(other, "u", reward)
        end(mine, "half", 1.0)
        reply = httpx.post(
            f"{mine.server_url}/agree_sync_weight", json={"client_uuid": mine.client_uuid}
        )
        assert reply.json()["success"] and mine.get_global_step() == 1
        assert other.agree_sync_weight()
        wait_until(lambda: mine.get_global_step() == 2, WAIT_S)
        entries = httpx.get(f"{mine.server_url}/get_run_log").json()["entries"]
        (step,) = [entry for entry in entries if entry["kind"] == "step"]
        assert len(step["groups"]) == 2
        (dropped,) = [entry for entry in entries if entry["kind"] == "dropped"]
        assert set(dropped["reasons"].values()) == {"fewer_than_two_rewards"}


def test_an_active_client_may_still_agree_after_the_server_was_restarted(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake")
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(
            TrainJob(
                batch_size=9, num_repeat=2, swarm_mode_sample_collection_method=ALL_CLIENTS_AGREE
            )
        )
        for task, reward in (("t", 0.0), ("t", 1.0), ("half", 1.0)):
            end(client, task, reward)
        server.kill()
        server.start()
        server.wait_until_healthy()
        wait_until(lambda: client.get_engine_status()[0] == "ENGINE.ROLLING", WAIT_S)
        assert client.agree_sync_weight()
        wait_until(lambda: client.get_global_step() == 2, WAIT_S)


def test_a_client_without_an_ended_episode_may_not_agree_and_most_jobs_need_no_agreement(
    processes: Processes,
) -> None:
    with client_of(processes, swarm_mode_sample_collection_method=ALL_CLIENTS_AGREE) as client:
        url = f"{client.server_url}/agree_sync_weight"
        reply = httpx.post(url, json={"client_uuid": "me"}).json()
        assert not reply["success"] and "is not in the active list" in reply["failure_reason"]
        client.auto_sync_train_config_and_start_engine(TrainJob(), force_restart=True)
        assert httpx.post(url, json={"client_uuid": "me"}).status_code == 400
        with pytest.raises(SwarmError, match="need no agreement"):
            client.agree_sync_weight()


def test_a_mix_whose_share_is_claimed_waits_for_the_other_mixes(processes: Processes) -> None:
    with client_of(processes, batch_size=4, num_repeat=1) as client:

        def claim(mix: str, task: str) -> dict[str, Any]:
            return _claim(client, {"share": 0.5, "mix": mix, "current_task_id": task, "ratio": 0.5})

        assert claim("code", "c0")["success"]
        assert claim("math", "m0")["success"]
        refused = claim("math", "m1")
        assert refused["fail_cause"].startswith("No available episodes to claim. ")
        assert "math has its share of 50% under way" in refused["fail_cause"]
        assert claim("math", "m0")["success"], "a task with a claimed episode may have more"


def test_a_mix_that_was_refused_for_want_of_a_slot_keeps_its_share(processes: Processes) -> None:
    with client_of(processes, batch_size=2, num_repeat=1) as client:
        half = ThrottlePolicy(share=0.5, ratio=0.5)
        for task in ("c0", "c1"):
            held, _ = client.begin_episode(
                throttle_policy=half.model_copy(update=_policy_fields("code", task))
            )
        math_policy = half.model_copy(update=_policy_fields("math", "m0")).model_dump(
            exclude_none=True
        )
        assert "limit of 2 claimed episodes" in _claim(client, math_policy)["fail_cause"]
        client.abort_episode(held)
        refused = _claim(client, math_policy | _policy_fields("code", "c2"))
        assert "code has its share of 50% under way" in refused["fail_cause"]


def _policy_fields(mix: str, task: str) -> dict[str, str]:
    return {"mix": mix, "current_task_id": task}


def test_a_claim_with_a_share_must_name_its_task(processes: Processes) -> None:
    with client_of(processes, batch_size=2, num_repeat=1) as client:
        body = {"client_uuid": "me", "episode_type": "train", "throttle_policy": {"share": 0.5}}
        refused = httpx.post(f"{client.server_url}/claim_episode", json=body)
        assert refused.status_code == 400 and "current_task_id" in refused.text
        share = ThrottlePolicy(share=0.5)
        with client.episode(Task(task_id="t"), throttle_policy=share) as episode:
            running = client.get_rollout_stat().running_episode_details
            assert running is not None
            assert [details["optional_task_id"] for details in running.values()] == ["t"]
            episode.end(reward=1.0)


def test_calls_and_renewals_of_its_episodes_keep_a_client_active(processes: Processes) -> None:
    with client_of(
        processes, batch_size=9, swarm_mode_sample_collection_method=ALL_CLIENTS_AGREE
    ) as client:
        end(client, "t", 1.0)

        def last_activity() -> float:
            instruction = client.get_rollout_stat().swarm_client_instruction
            assert instruction is not None
            return instruction["active_clients"][0]["last_activity_at"]

        uuid, access = client.begin_episode()
        claimed = last_activity()
        with access.openai() as app:
            app.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
        called = last_activity()
        assert called > claimed + 0.001  # both times are from one clock, apart from rounding
        client.renew_episode(uuid)
        assert last_activity() > called
