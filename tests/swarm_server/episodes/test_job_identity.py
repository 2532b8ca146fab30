"""Which changes of a job make it another job, so that waiting groups are dropped."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EndGroupRequest
from fakevllm_server.episodes.job_identity import changed_settings, digest_of
from fakevllm_server.episodes.submissions import hash_of

PENALTY: dict[str, Any] = {"overlong_buffer_len": 2, "max_response_length": 8}


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"model": "another"}, ["model"]),
        ({"experiment_name": "b"}, ["experiment_name"]),
        ({"use_kl_in_reward": True}, ["kl_in_reward"]),
        (PENALTY, ["length_penalty"]),
        ({"model": "another", "experiment_name": None}, ["model", "experiment_name"]),
    ],
    ids=str,
)
def test_another_model_experiment_or_reward_makes_another_job(
    change: dict[str, Any], changed: list[str]
) -> None:
    before = TrainJob(experiment_name="a")
    after = before.model_copy(update=change)
    assert changed_settings(before, after) == changed_settings(after, before) == changed


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.5},
        {"batch_size": 2},
        {"num_repeat": 2},
        {"filter_groups": "collect"},
        {"kl_coef": 0.5},
        {"max_response_length": 8},
        {"save_freq": 1},
        {"total_training_steps": 9},
    ],
    ids=str,
)
def test_a_job_that_rewards_the_same_stays_the_same_job(change: dict[str, Any]) -> None:
    before = TrainJob(experiment_name="a")
    assert changed_settings(before, before.model_copy(update=change)) == []


def test_the_digest_changes_only_with_the_identity_of_the_job() -> None:
    job = TrainJob(experiment_name="a")
    assert digest_of(job) == digest_of(job.model_copy(update={"lr": 1e-3, "batch_size": 7}))
    assert digest_of(job) != digest_of(TrainJob(experiment_name="b")) != digest_of(TrainJob())


def test_the_end_of_a_group_is_the_same_request_with_and_without_the_digest_of_its_hooks() -> None:
    old = EndGroupRequest(group_id="g", rewards=[1.0])
    assert hash_of(old) == hash_of(old.model_copy(update={"hook_hash": "abc"}))
