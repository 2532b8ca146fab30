"""Checks of whole jobs: a refusal is one line that says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob, parse_job
from fakevllm_adapters.job.validation import LENGTH_SETTINGS, check_job

ALL_LENGTHS: dict[str, Any] = dict(zip(LENGTH_SETTINGS, (3000, 15000, 4096, 18000), strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        ALL_LENGTHS,
        {"overlong_buffer_len": 512, "max_response_length": 2048},
        {**ALL_LENGTHS, "overlong_buffer_len": 512},
        {"n_gpu": 8, "batch_size": 32, "num_repeat": 4},
        {"n_gpu": 8, "batch_size": 8, "num_repeat": 4, "tensor_model_parallel_size": 2},
        {"lora_rank": 8, "lr": 3e-5},
        {"backbone": "debug"},
        {"async_steps": 4},
    ],
)
def test_a_valid_job_is_returned_unchanged(settings: dict[str, Any]) -> None:
    assert check_job(TrainJob(**settings)) == TrainJob(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_model_len": 4096},
            "go together: set max_prompt_length, max_response_length, "
            "max_response_length_in_one_turn too, or none of them",
        ),
        (
            {**ALL_LENGTHS, "max_response_length_in_one_turn": None},
            "go together: set max_response_length_in_one_turn too, or none of them",
        ),
        ({"max_response_length": 9}, "go together: set max_prompt_length, "),
        (
            {**ALL_LENGTHS, "max_prompt_length": 3001},
            "max_prompt_length 3001 and max_response_length 15000 are more than max_model_len "
            "18000: raise that to 18001, or lower them",
        ),
        (
            {**ALL_LENGTHS, "max_response_length_in_one_turn": 15001},
            "max_response_length_in_one_turn 15001 is more than max_response_length 15000: lower "
            "it to 15000 or less",
        ),
        (
            {**ALL_LENGTHS, "overlong_buffer_len": 4097},
            "overlong_buffer_len must not be above max_response_length_in_one_turn",
        ),
        (
            {"n_gpu": 3, "batch_size": 4, "num_repeat": 4},
            "batch_size 4 times num_repeat 4 is 16 episodes a step, which n_gpu 3 does not divide",
        ),
        (
            {"n_gpu": 2, "tensor_model_parallel_size": 4},
            "tensor_model_parallel_size 4 does not divide n_gpu 2: lower it, or set n_gpu to a",
        ),
        ({"backbone": "trinity"}, "backbone trinity is not supported: take it out, or name verl"),
        ({"lora_rank": 8}, "lr 1e-06 is too small for adapters (lora_rank 8): set lr above 1e-05"),
        ({"tau_pos": 2.0}, "tau_pos = 2.0 would change nothing"),
    ],
)
def test_an_invalid_job_is_refused_with_a_fix(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_job(TrainJob(**settings))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a YAML mapping with the key `job`, or AgentJet's `ajet`"),
        ("job: {}\najet: {}", "expected a YAML mapping with the key `job`, or AgentJet's `ajet`"),
        ("job: {a: [", "not YAML: "),
        ("job: hello", "expected a mapping below `job`"),
        ("job: {batchsize: 8}", "batchsize is no setting of a job: take it out"),
        ("job: {batch_size: 8, batch_size: 9}", "'batch_size' is set twice: set it once"),
        ("job: {batch_size: 0}", "batch_size: Input should be greater than or equal to 1, got 0"),
        ("job: {batch_size: 10001}", "batch_size: Input should be less than or equal to 10000"),
        ("job: {batch_size: many}", "batch_size: Input should be a valid integer"),
        ("job: {num_repeat: 0}", "num_repeat: Input should be greater than or equal to 1, got 0"),
        ("job: {max_env_worker: 0}", "max_env_worker: Input should be greater than or equal to 1"),
        ("job: {max_env_worker: 3}", "max_env_worker 3 is less than num_repeat 4: the episodes"),
        ("job: {n_gpu: 0}", "n_gpu: Input should be greater than or equal to 1, got 0"),
        ("job: {algorithm: ppo}", "algorithm: Input should be 'grpo', "),
        ("job: {lr: .nan}", "lr: Input should be a finite number, got nan"),
        ("job: {async_steps: 17}", "async_steps: Input should be less than or equal to 16"),
        ("job: {async_steps: 5}", "async_steps 5 is more than max_staleness 4: groups that are"),
        ("job: {async_steps: 1, lockstep: true}", "async_steps 1 and lockstep contradict each"),
        (
            "job: {async_steps: 1, "
            "swarm_mode_sample_collection_method: rollout_until_finish_enough_episodes}",
            "async_steps 1 needs steps of batch_size groups, and rollout_until_finish_enough_epi",
        ),
        ("ajet: [1]", "expected a mapping below `ajet`"),
        ("ajet: {data: hello}", "expected a mapping below `ajet.data`"),
        ("ajet: {data: {train_batch_size: many}}", "ajet.data.train_batch_size: Input should be"),
        ("ajet: {rollout: {num_repeat: 0}}", "ajet.rollout.num_repeat: Input should be"),
        ("ajet: {model: {path: 5}}", "ajet.model.path: Input should be a valid string, got 5"),
    ],
)
def test_an_invalid_yaml_is_refused_with_the_key_as_the_user_wrote_it(
    text: str, message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        check_job(parse_job(text).job)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_the_maximum_answer_length_is_that_of_a_turn_or_else_of_the_response() -> None:
    assert TrainJob(**ALL_LENGTHS).max_answer_length == 4096
    assert TrainJob(max_response_length=9).max_answer_length == 9
    assert TrainJob().max_answer_length is None


def test_target_modules_and_lora_target_modules_are_the_same_setting() -> None:
    job = TrainJob.model_validate({"lora_target_modules": ["q_proj", "v_proj"]})
    assert job.target_modules == job.lora_target_modules == "q_proj,v_proj"
    same = {"lora_target_modules": "q_proj", "target_modules": "q_proj"}
    assert TrainJob.model_validate(same).target_modules == "q_proj"
    with pytest.raises(ValueError, match="are one setting: set only one"):
        TrainJob.model_validate({"lora_target_modules": "q_proj", "target_modules": "v_proj"})
