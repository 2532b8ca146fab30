"""Which changes of a job make it another job, so that waiting groups are dropped."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.job_identity import changed_settings

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
