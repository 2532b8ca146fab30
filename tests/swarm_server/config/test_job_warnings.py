"""What a job asks for and this server does not do is told, a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob, parse_job
from fakevllm_server.config.job_warnings import EVERYWHERE, job_warnings
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


def told(job: TrainJob, config: ServerConfig) -> list[str]:
    lines = job_warnings(job, config)
    assert all(" is without effect: " in line and "\n" not in line for line in lines)
    return sorted(line.partition(" = ")[0] for line in lines)


def test_a_job_of_defaults_has_nothing_to_tell() -> None:
    assert job_warnings(TrainJob(), FAKE) == job_warnings(TrainJob(), VLLM) == []


def test_a_stock_job_is_told_what_it_does_not_get() -> None:
    job = parse_job(stock()).job
    everywhere = ["logging", "max_prompt_length", "max_response_length", "n_gpu"]
    engine = ["gpu_memory_utilization", "max_model_len", "max_num_seqs"]
    at_fake = [*everywhere, *engine, "backbone", "model", "tensor_model_parallel_size"]
    assert told(job, FAKE) == sorted(at_fake)
    assert told(job, VLLM) == sorted([*everywhere, "backbone"])
    assert told(job, ServerConfig("verl", Path("runs"))) == everywhere


def test_the_servers_own_flags_are_named_where_they_win() -> None:
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


def test_an_argument_of_the_engine_that_the_server_was_given_wins_over_the_jobs() -> None:
    job = TrainJob(**ENGINE)
    assert told(job, VLLM) == []
    given = ServerConfig("vllm", Path("runs"), engine_args=("--max_num_seqs=4",))
    assert job_warnings(job, given) == [
        "max_num_seqs = 8 is without effect: "
        "the server was started with --engine-arg=--max-num-seqs"
    ]
    elsewhere = ServerConfig("vllm", Path("runs"), rollout_url="http://10.0.0.1:8000")
    assert told(job, elsewhere) == told(job, FAKE) == sorted(ENGINE)


def test_lengths_that_only_have_to_fit_are_told() -> None:
    assert told(TrainJob(**LENGTHS), VLLM) == ["max_prompt_length", "max_response_length"]
    shaped = TrainJob(**LENGTHS, overlong_buffer_len=5)
    assert told(shaped, VLLM) == ["max_prompt_length"]
    ours = TrainJob(max_response_length=20, overlong_buffer_len=5)
    assert told(ours, VLLM) == []


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_setting_without_effect_is_a_setting_of_the_job(name: str) -> None:
    assert name in TrainJob.model_fields


def test_a_job_that_compares_nothing_is_told_so() -> None:
    (line,) = job_warnings(TrainJob(num_repeat=1), FAKE)
    assert line.startswith("num_repeat = 1 trains nothing") and line.endswith("set 2 or more")
    assert job_warnings(TrainJob(num_repeat=1, algorithm="remax"), FAKE) == []  # the greedy answer
