"""The job that an active client creates."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakevllm.sdk.job import TrainJob
from fakevllm_adapters.job.model import parse_job
from tests.adapters.job.ajet_jobs import stock


def write_job(folder: Path, text: str, name: str = "job.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_job_has_the_arguments_of_agentjets_job_as_attributes() -> None:
    job = TrainJob(
        algorithm="grpo",
        project_name="p",
        experiment_name="e",
        n_gpu=8,
        model="x",
        batch_size=32,
        num_repeat=4,
    )
    assert job.batch_size * job.num_repeat == 128
    assert (job.algorithm, job.project_name, job.experiment_name) == ("grpo", "p", "e")
    assert (job.n_gpu, job.model, job.lr) == (8, "x", TrainJob().lr)


def test_an_argument_of_none_counts_as_not_set(tmp_path: Path) -> None:
    unset: dict[str, Any] = {"lr": None, "n_gpu": None, "lora_target_modules": None}
    assert TrainJob(**unset) == TrainJob()
    base = write_job(tmp_path, "job: {lr: 2.0e-5, max_mismatch_k3: 0.5}")
    job = TrainJob(base_yaml_config=base, max_mismatch_k3=None, **unset)
    assert (job.lr, job.max_mismatch_k3) == (2e-5, None)


@pytest.mark.parametrize(
    "text",
    [
        "job: {lr: 2.0e-5, batch_size: 16}",
        stock(ajet__trainer_common__optim__lr=2e-5, ajet__data__train_batch_size=16),
    ],
    ids=["ours", "AgentJet's"],
)
def test_arguments_win_over_the_base_file_and_the_base_file_over_defaults(
    tmp_path: Path, text: str
) -> None:
    job = TrainJob(base_yaml_config=write_job(tmp_path, text), batch_size=64)
    assert (job.batch_size, job.lr, job.std_floor) == (64, 2e-5, TrainJob().std_floor)


def test_the_switch_of_the_kl_loss_sets_its_weight() -> None:
    assert (TrainJob().use_kl_loss, TrainJob(kl_loss_coef=0.1).use_kl_loss) == (False, True)
    assert TrainJob(use_kl_loss=True).kl_loss_coef == 0.002
    assert TrainJob(use_kl_loss=True, kl_loss_coef=0.1).kl_loss_coef == 0.1
    switched_off = TrainJob(use_kl_loss=False, kl_loss_coef=0.1, kl_loss_type="k1")
    assert (switched_off.kl_loss_coef, switched_off.use_kl_loss) == (0.0, False)
    assert "use_kl_loss" not in TrainJob(use_kl_loss=True).as_yaml()


def test_the_switch_of_the_kl_loss_overrides_the_base_file(tmp_path: Path) -> None:
    weighted = write_job(tmp_path, "job: {kl_loss_coef: 0.1, kl_loss_type: k1}")
    off = write_job(tmp_path, stock(ajet__trainer_common__use_kl_loss=False), "off.yaml")
    assert TrainJob(base_yaml_config=weighted, use_kl_loss=False).kl_loss_coef == 0.0
    assert TrainJob(base_yaml_config=weighted, use_kl_loss=True).kl_loss_coef == 0.1
    assert TrainJob(base_yaml_config=off).kl_loss_coef == 0.0
    assert TrainJob(base_yaml_config=off, use_kl_loss=True).kl_loss_coef == 0.002
    assert TrainJob(base_yaml_config=off, kl_loss_coef=0.1).kl_loss_coef == 0.1
    assert TrainJob(kl_loss_coef=0.1).build_job_from_yaml(off).kl_loss_coef == 0.0


def test_build_job_from_yaml_replaces_the_jobs_settings(tmp_path: Path) -> None:
    base = write_job(tmp_path, "job: {lr: 2.0e-5, seed: 3}", "base.yaml")
    job = TrainJob(base_yaml_config=base, batch_size=64, num_repeat=2)
    again = job.build_job_from_yaml(write_job(tmp_path, "job: {lr: 3.0e-5, batch_size: 16}"))
    assert again is job
    assert (job.lr, job.batch_size, job.num_repeat, job.seed) == (3e-5, 16, 2, 3)
    assert job.model_fields_set >= {"lr", "batch_size", "num_repeat", "seed"}
    assert job.as_yaml() == TrainJob(lr=3e-5, batch_size=16, num_repeat=2, seed=3).as_yaml()


def test_a_file_with_wrong_settings_leaves_the_job_unchanged(tmp_path: Path) -> None:
    job = TrainJob(n_gpu=4, batch_size=4)
    with pytest.raises(ValueError, match="which n_gpu 3 does not divide"):
        job.build_job_from_yaml(write_job(tmp_path, "job: {n_gpu: 3}"))
    assert job == TrainJob(n_gpu=4, batch_size=4)


def test_a_dumped_job_is_read_back_equal_by_client_and_server(tmp_path: Path) -> None:
    base = write_job(tmp_path, "job: {lr: 2.0e-5}", "base.yaml")
    job = TrainJob(base_yaml_config=base, n_gpu=8, batch_size=32, lora_target_modules="all-linear")
    path = str(tmp_path / "deeper" / "job.yaml")
    assert job.dump_job_as_yaml(path) == path
    text = Path(path).read_text()
    assert yaml.safe_load(text) == {"job": {"n_gpu": 8, "batch_size": 32, "lr": 2e-5}}
    assert TrainJob(base_yaml_config=path).model_dump() == job.model_dump()
    assert parse_job(text).job.model_dump() == job.model_dump() | {
        "base_yaml_config": None,
        "ensure_new_experiment": False,
    }


def test_a_new_experiment_has_the_time_in_its_name_once(tmp_path: Path) -> None:
    before = datetime.now().replace(microsecond=0)
    job = TrainJob(experiment_name="e", ensure_new_experiment=True)
    assert job.experiment_name is not None and job.ensure_new_experiment
    stamp = datetime.strptime(job.experiment_name, "e_%Y%m%d-%H%M%S")
    assert before <= stamp <= datetime.now()
    name = job.experiment_name
    assert TrainJob(base_yaml_config=job.dump_job_as_yaml(tmp_path / "j")).experiment_name == name
    assert job.build_job_from_yaml(tmp_path / "j").experiment_name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"base_yaml_config": "nowhere.yaml"},
            "the job's YAML nowhere.yaml cannot be read: No such",
        ),
        ({"lr": -1}, "lr: Input should be greater than 0, got -1"),
        ({"frobnicate": 1}, "frobnicate is no setting of a job: take it out"),
        (
            {"experiment": "b"},
            "experiment is no setting of a job: take it out, or write experiment_name",
        ),
        ({"batchsize": 8}, "batchsize is no setting of a job: take it out, or write batch_size"),
        ({"n_gpu": 3}, "batch_size 8 times num_repeat 4 is 32 episodes a step, which n_gpu 3 does"),
        (
            {"max_model_len": 9},
            "max_prompt_length, max_response_length, max_response_length_in_one",
        ),
    ],
)
def test_a_wrong_setting_is_reported_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        TrainJob(**arguments)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a YAML mapping with the key `job`"),
        ("job: {base_yaml_config: other.yaml}", "names a base_yaml_config: use one file"),
    ],
)
def test_a_file_without_a_valid_job_is_reported_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    file = write_job(tmp_path, text)
    with pytest.raises(ValueError) as raised:
        TrainJob(base_yaml_config=file)
    assert file in str(raised.value) and message in str(raised.value)


def test_ignored_keys_of_agentjets_yaml_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fakevllm.sdk")
    TrainJob(base_yaml_config=write_job(tmp_path, stock(ajet__rollout__top_p=0.9)))
    assert any("ajet.rollout.top_p = 0.9 is not read" in line for line in caplog.messages)
