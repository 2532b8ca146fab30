"""Jobs read from AgentJet's YAML, and warnings about the keys that are not read."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fakevllm_adapters.job.ajet_yaml import AJET_KEYS, IGNORED_KEYS
from fakevllm_adapters.job.model import TrainJob, parse_job
from fakevllm_adapters.job.validation import check_job
from tests.adapters.job.ajet_jobs import stock

BETAS = "ajet.trainer_common.optim.betas = [0.9, 0.999] is not read: betas are 0.9 and 0.95"


def test_a_stock_job_is_read_with_its_own_values() -> None:
    job, warnings = parse_job(stock())
    assert check_job(job) == TrainJob(
        project_name="ajet_default_project",
        backbone="verl",
        model="Qwen/Qwen2.5-7B-Instruct",
        n_gpu=8,
        logging="tensorboard",
        batch_size=32,
        num_repeat=4,
        max_env_worker=128,
        temperature=0.9,
        max_prompt_length=3000,
        max_response_length=15000,
        max_response_length_in_one_turn=4096,
        max_model_len=18000,
        max_num_seqs=64,
        gpu_memory_utilization=0.85,
        tensor_model_parallel_size=1,
        lr=1e-6,
        weight_decay=0.01,
        grad_clip=20.0,
        kl_loss_coef=0.002,
        save_freq=20,
    )
    assert warnings == [BETAS]


def test_every_key_sets_its_setting() -> None:
    assert set(AJET_KEYS) <= set(TrainJob.model_fields)
    changes: dict[str, Any] = {
        "ajet__lora__lora_rank": 8,
        "ajet__lora__lora_alpha": 32,
        "ajet__lora__target_modules": ["q_proj", "v_proj"],
        "ajet__lora__load_format": "safetensors",
        "ajet__lora__layered_summon": True,
        "ajet__trainer_common__optim__lr": "3e-5",
        "ajet__trainer_common__total_training_steps": 7,
        "ajet__trainer_common__logger": ["console", "swanlab"],
        "ajet__trainer_common__train_print_to_markdown_file_path": "train.md",
        "ajet__trainer_common__val_print_to_markdown_file_path": "val.md",
        "ajet__rollout__compute_madness_checklist": ["nonsense"],
        "ajet__trainer_common__algorithm": {"adv_estimator": "rloo", "use_kl_in_reward": True},
        "ajet__trainer_common__use_kl_in_reward": None,
        "ajet__experiment_name": "e",
        "ajet__experiment_dir": "runs/e",
        "ajet__trainer_common__nnodes": 2,
        "ajet__trainer_common__kl_penalty_type": "low_var_kl",
        "ajet__context_tracker__timeline_merging_policy__timeline_compare_level": "token",
    }
    job, _ = parse_job(stock(**changes))
    assert (job.lora_rank, job.lora_alpha, job.lora_target_modules) == (8, 32, "q_proj,v_proj")
    assert (job.lora_load_format, job.layered_summon, job.lr) == ("safetensors", True, 3e-5)
    assert (job.total_training_steps, job.logging) == (7, "console,swanlab")
    assert job.compute_madness_checklist == ("nonsense",)
    assert (job.algorithm, job.use_kl_in_reward) == ("rloo", True)
    assert (job.experiment_name, job.experiment_dir) == ("e", "runs/e")
    assert (job.nnodes, job.kl_penalty_type) == (2, "low_var_kl")
    at_default = {name for name in AJET_KEYS if name not in job.model_fields_set}
    assert at_default == set()


@pytest.mark.parametrize("ignored", IGNORED_KEYS, ids=lambda ignored: ignored.key)
def test_a_key_that_would_change_training_and_is_not_read_causes_a_warning(ignored: Any) -> None:
    changed = stock(**{ignored.key.replace(".", "__"): "other"})
    _, warnings = parse_job(changed)
    (warning,) = [
        line for line in warnings if line.startswith(f"{ignored.key} = 'other' is not read")
    ]
    assert warning.endswith(ignored.instead)
    usual = stock(**{ignored.key.replace(".", "__"): ignored.silent[0]})
    assert not [line for line in parse_job(usual)[1] if line.startswith(ignored.key)]


def test_settings_that_the_yaml_switches_off_keep_their_defaults() -> None:
    job, _ = parse_job(
        stock(
            ajet__trainer_common__use_kl_loss=False,
            ajet__trainer_common__kl_loss_type="full",
            ajet__lora__lora_alpha=64,
            ajet__trainer_common__mini_batch_num=-1,
            ajet__trainer_common__total_training_steps=0,
        )
    )
    check_job(job)
    assert (job.kl_loss_coef, job.lora_alpha, job.mini_batch_num) == (0.0, 16, 1)
    assert job.total_training_steps is None


def test_a_job_with_the_kl_loss_switched_on_gets_agentjets_weight_if_it_sets_none() -> None:
    partial = "ajet: {trainer_common: {use_kl_loss: true}}"
    assert parse_job(partial).job.kl_loss_coef == 0.002
    assert parse_job("ajet: {trainer_common: {use_kl_loss: null}}").job.kl_loss_coef == 0.0
    assert parse_job(stock(ajet__trainer_common__kl_loss_coef=0.1)).job.kl_loss_coef == 0.1


def test_a_kl_loss_switch_that_is_no_boolean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^use_kl_loss must be true or false, got 'maybe'$"):
        parse_job(stock(ajet__trainer_common__use_kl_loss="maybe"))


def test_the_older_key_of_the_timeline_comparison_is_read() -> None:
    job, _ = parse_job(stock(ajet__context_tracker={"timeline_compare_level": "token"}))
    assert "timeline_compare_level" in job.model_fields_set


def test_a_job_without_checkpoints_causes_a_warning_that_checkpoints_are_kept() -> None:
    job, warnings = parse_job(stock(ajet__trainer_common__save_freq=0))
    assert job.save_freq == TrainJob().save_freq
    assert warnings[1:] == [
        "ajet.trainer_common.save_freq = 0 is not read: checkpoints are always kept"
    ]


def test_an_unknown_key_is_ignored() -> None:
    assert parse_job(stock(ajet__rollout__new_key=1, trinity={})) == parse_job(stock())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ajet": None}, "expected a mapping below `ajet`, with all of AgentJet's settings"),
        ({"ajet": {}}, "expected a mapping below `ajet`, with all of AgentJet's settings"),
        ({"ajet__rollout": 3}, "expected a mapping below `ajet.rollout`"),
        ({"job": {}}, "expected a YAML mapping with the key `job`, or AgentJet's `ajet`"),
        (
            {"ajet__trainer_common__algorithm__adv_estimator": "gae"},
            "ajet.trainer_common.algorithm.adv_estimator: Input should be 'grpo', ",
        ),
        (
            {"ajet__swarm_mode_sample_collection_method": "at_once"},
            "ajet.swarm_mode_sample_collection_method: Input should be 'rollout_until_",
        ),
        (
            {"ajet__rollout__num_repeat": 0, "ajet__data__train_batch_size": "many"},
            "ajet.rollout.num_repeat: Input should be greater than or equal to 1, got 0; "
            "ajet.data.train_batch_size: Input should be a valid integer",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_key_as_the_user_wrote_it(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        parse_job(stock(**changes))
    assert all(part in str(raised.value) for part in message.split("; "))
    assert "\n" not in str(raised.value)


def test_a_mistake_in_a_job_mapping_is_one_line_too() -> None:
    with pytest.raises(ValueError, match=r"^frobnicate is no setting of a job: take it out$"):
        parse_job("job: {frobnicate: 1}")
    with pytest.raises(ValueError, match=r"^not YAML: [^\n]+$"):
        parse_job("job: [")
    with pytest.raises(ValueError, match=r"^expected a mapping below `job`$"):
        parse_job("job: 3")


def test_a_long_key_with_line_breaks_gives_a_short_message_of_one_line() -> None:
    with pytest.raises(ValueError) as raised:
        parse_job(yaml.safe_dump({"job": {"a\nb" * 5000: 1}}))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_a_long_value_is_quoted_only_in_part() -> None:
    with pytest.raises(ValueError) as raised:
        parse_job(yaml.safe_dump({"job": {"lr": "x" * 5000}}))
    assert len(str(raised.value)) < 200
