import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import (
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from fakevllm_adapters.protocol.swarm import EndGroupRequest, WorkflowOutput, parse_sibling


def test_a_job_survives_its_yaml() -> None:
    job = TrainJob(model="m", num_repeat=6, lr=3e-5, control="shuffled")
    assert TrainJob.from_yaml(job.as_yaml()) == job


def test_a_job_sends_only_what_it_sets_so_that_older_servers_know_every_field() -> None:
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
def test_what_is_no_job_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        TrainJob.from_yaml(text)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rewards_must_be_finite(reward: float) -> None:
    with pytest.raises(ValidationError):
        EndGroupRequest(group_id="g", rewards=[1.0, reward])
    with pytest.raises(ValidationError):
        WorkflowOutput(reward=reward)


def test_a_group_has_a_largest_size() -> None:
    with pytest.raises(ValidationError):
        EndGroupRequest(group_id="g", rewards=[1.0] * 257)


@pytest.mark.parametrize("header", ["", "g", "/1", "g/", "g/-1", "g/x"])
def test_a_sibling_header_reads_group_slash_index(header: str) -> None:
    with pytest.raises(ValueError, match="must read <group id>/<index>"):
        parse_sibling(header)


def test_a_group_id_may_hold_a_slash() -> None:
    ref = parse_sibling("a/b/3")
    assert (ref.group_id, ref.index, ref.episode_id) == ("a/b", 3, "a/b/3")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_floats_come_back(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values
