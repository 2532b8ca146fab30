"""The YAML of a training job."""

from __future__ import annotations

import pytest
import yaml

from fakevllm_adapters.job.model import TrainJob


def test_a_job_survives_a_round_trip_through_yaml() -> None:
    job = TrainJob(model="m", num_repeat=6, lr=3e-5, control="shuffled")
    assert TrainJob.from_yaml(job.as_yaml()) == job


def test_the_yaml_of_a_job_has_only_values_that_differ_from_the_default() -> None:
    sent = yaml.safe_load(TrainJob(lr=3e-5, clip_ratio_high=0.3, seed=0).as_yaml())
    assert sent == {"job": {"lr": 3e-5, "clip_ratio_high": 0.3}}
    assert TrainJob.from_yaml(TrainJob().as_yaml()) == TrainJob()


@pytest.mark.parametrize(
    ("written", "threshold"), [("2", "2"), ("2.5", "2.5"), ('"0.5_2"', "0.5_2")]
)
def test_a_threshold_may_be_a_plain_number(written: str, threshold: str) -> None:
    text = f"job: {{rollout_is_threshold: {written}, rollout_rs_threshold: {written}}}"
    job = TrainJob.from_yaml(text)
    assert (job.rollout_is_threshold, job.rollout_rs_threshold) == (threshold, threshold)


@pytest.mark.parametrize(
    "text",
    ["", "a: [", "[1]", "ajet: {}", "job: {frobnicate: 1}", "job: {rollout_is_threshold: true}"],
)
def test_yaml_that_is_not_a_job_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        TrainJob.from_yaml(text)
