"""Which changes of a job make it another job, so that waiting groups are dropped."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EndGroupRequest
from fakevllm_server.episodes.job_identity import (
    JobIdentity,
    changed_settings,
    identity_of,
    parse_identity,
)
from fakevllm_server.episodes.submissions import hash_of

PENALTY: dict[str, Any] = {"overlong_buffer_len": 2, "max_response_length": 8}


def identity(model: str | None = "m", name: str | None = "a", **settings: Any) -> JobIdentity:
    return identity_of(TrainJob(**settings), model, name)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"model": "another"}, ["model"]),
        ({"name": "b"}, ["experiment_name"]),
        ({"use_kl_in_reward": True}, ["kl_in_reward"]),
        (PENALTY, ["length_penalty"]),
        ({"model": "another", "name": None}, ["model", "experiment_name"]),
    ],
    ids=str,
)
def test_another_model_experiment_or_reward_makes_another_job(
    change: dict[str, Any], changed: list[str]
) -> None:
    before, after = identity(), identity(**change)
    assert changed_settings(before, after) == changed_settings(after, before) == changed
    assert before.digest != after.digest


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
    assert changed_settings(identity(), identity(**change)) == []
    assert identity().digest == identity(**change).digest


def test_the_model_and_the_name_in_the_job_do_not_count_but_those_of_the_run() -> None:
    job = TrainJob(model="./models/m", experiment_name=None)
    assert identity_of(job, "m", "a") == identity()


@pytest.mark.parametrize("settings", [{}, PENALTY, {"use_kl_in_reward": True}], ids=str)
def test_an_identity_is_read_as_it_was_written(settings: dict[str, Any]) -> None:
    for written in (identity(**settings), identity(None, None, **settings)):
        assert parse_identity(written.to_json()) == written


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_a_malformed_identity_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_identity(text)


def test_a_setting_of_a_newer_version_is_ignored() -> None:
    text = identity().to_json().replace("{", '{"newer": 1, ', 1)
    assert parse_identity(text) == identity()


def test_the_end_of_a_group_is_the_same_request_with_and_without_the_digest_of_its_hooks() -> None:
    old = EndGroupRequest(group_id="g", rewards=[1.0])
    assert hash_of(old) == hash_of(old.model_copy(update={"hook_hash": "abc"}))
