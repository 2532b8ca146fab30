"""Warnings about settings of a job without effect: one line for each setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob, parse_job
from fakevllm_adapters.job.unused_settings import NEVER_USED
from fakevllm_server.config.job_warnings import job_warnings
from fakevllm_server.config.model import ServerConfig
from tests.adapters.job.ajet_jobs import stock

FAKE = ServerConfig("fake", Path("runs"))
VLLM = ServerConfig("vllm", Path("runs"))
ENGINE: dict[str, Any] = {
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.5,
    "tensor_model_parallel_size": 2,
}
LENGTHS: dict[str, Any] = {
    "max_prompt_length": 10,
    "max_response_length": 20,
    "max_response_length_in_one_turn": 20,
    "max_model_len": 30,
}


def warned_settings(job: TrainJob, config: ServerConfig) -> list[str]:
    lines = job_warnings(job, config)
    assert all(" is without effect: " in line and "\n" not in line for line in lines)
    return sorted(line.partition(" = ")[0] for line in lines)


def test_a_default_job_has_no_warnings() -> None:
    assert job_warnings(TrainJob(), FAKE) == job_warnings(TrainJob(), VLLM) == []


def test_a_stock_ajet_job_has_a_warning_for_each_setting_without_effect() -> None:
    job = parse_job(stock()).job
    everywhere = ["logging", "max_prompt_length", "max_response_length", "n_gpu"]
    engine = ["gpu_memory_utilization", "max_model_len", "max_num_seqs"]
    at_fake = [*everywhere, *engine, "backbone", "model", "tensor_model_parallel_size"]
    assert warned_settings(job, FAKE) == sorted(at_fake)
    assert warned_settings(job, VLLM) == sorted([*everywhere, "backbone"])
    assert warned_settings(job, ServerConfig("verl", Path("runs"))) == everywhere


def test_a_warning_names_the_server_flag_that_overrides_the_job() -> None:
    job = TrainJob(model="theirs", backbone="verl")
    config = ServerConfig("vllm", Path("runs"), model="demo")
    assert job_warnings(job, config) == [
        "backbone = 'verl' is without effect: the server was started with --backend vllm",
        "model = 'theirs' is without effect: the server was started with --model demo",
    ]
    assert job_warnings(TrainJob(model="demo", backbone="vllm"), config) == []
    mixed = ServerConfig("embedded", Path("runs"), rollout="vllm", trainer="verl")
    assert job_warnings(TrainJob(backbone="verl"), mixed) == []
    assert job_warnings(TrainJob(backbone="embedded"), mixed) == [
        "backbone = 'embedded' is without effect: the server was started with --trainer verl"
    ]


def test_an_engine_argument_of_the_server_overrides_the_jobs() -> None:
    job = TrainJob(**ENGINE)
    assert warned_settings(job, VLLM) == []
    config = ServerConfig("vllm", Path("runs"), engine_args=("--max_num_seqs=4",))
    assert job_warnings(job, config) == [
        "max_num_seqs = 8 is without effect: "
        "the server was started with --engine-arg=--max-num-seqs"
    ]
    external = ServerConfig("vllm", Path("runs"), rollout_url="http://10.0.0.1:8000")
    assert warned_settings(job, external) == warned_settings(job, FAKE) == sorted(ENGINE)


def test_lengths_that_are_only_checked_have_a_warning() -> None:
    assert warned_settings(TrainJob(**LENGTHS), VLLM) == [
        "max_prompt_length",
        "max_response_length",
    ]
    shaped = TrainJob(**LENGTHS, overlong_buffer_len=5)
    assert warned_settings(shaped, VLLM) == ["max_prompt_length"]
    ours = TrainJob(max_response_length=20, overlong_buffer_len=5)
    assert warned_settings(ours, VLLM) == []


def test_agentjets_arguments_without_effect_have_a_warning() -> None:
    job = TrainJob(nnodes=2, kl_penalty_type="low_var_kl", timeline_compare_level="text")
    assert warned_settings(job, FAKE) == ["kl_penalty_type", "nnodes", "timeline_compare_level"]
    what_happens_anyway = TrainJob(nnodes=1, kl_penalty_type="k1", timeline_compare_level="token")
    assert warned_settings(what_happens_anyway, FAKE) == []


@pytest.mark.parametrize("name", NEVER_USED)
def test_a_setting_that_is_never_used_is_a_setting_of_the_job(name: str) -> None:
    assert name in TrainJob.model_fields


def test_a_job_with_single_answers_has_a_warning() -> None:
    (line,) = job_warnings(TrainJob(num_repeat=1), FAKE)
    assert line.startswith("num_repeat = 1 trains nothing") and line.endswith("set 2 or more")
    assert (
        job_warnings(TrainJob(num_repeat=1, algorithm="remax"), FAKE) == []
    )  # compares with the greedy answer
