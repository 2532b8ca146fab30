"""`run.json` says what a run was made with, and nothing of where or with which keys."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.model import ServerConfig, find_model
from fakevllm_server.run import metadata
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.metadata import HIDDEN, engine_start, versions, with_engine_start

ONE: dict[str, Any] = {"job": {"lr": 1.0}}
OTHER: dict[str, Any] = {"job": {"lr": 2.0}}


def lives(text: str) -> list[dict[str, Any]]:
    return json.loads(text)["lives"]


def test_the_examples_in_its_docstrings_hold() -> None:
    assert doctest.testmod(metadata).failed == 0


def test_each_start_is_a_life_and_the_same_again_one_time_more() -> None:
    text = None
    for now, life in enumerate([ONE, ONE, OTHER, ONE]):
        text = with_engine_start(text, "run-1", life, float(now))
    assert text is not None
    assert json.loads(text)["run_id"] == "run-1"
    assert [(one["job"]["lr"], len(one["started"])) for one in lives(text)] == [
        (1.0, 2),
        (2.0, 1),
        (1.0, 1),
    ]
    assert lives(text)[0]["started"] == ["1970-01-01T00:00:00Z", "1970-01-01T00:00:01Z"]


@pytest.mark.parametrize("known", ["", "{", "[]", '{"lives": 3}', '{"lives": [{"started": 1}]}'])
def test_a_file_that_is_none_is_begun_anew(known: str) -> None:
    assert len(lives(with_engine_start(known, "run-1", ONE, 0.0))) == 1


def test_a_life_has_every_setting_of_the_job_the_seeds_and_versions(tmp_path: Path) -> None:
    model = tmp_path / "my_model"
    model.mkdir()
    config = ServerConfig("fake", tmp_path / "run", seed=7, engine_args=["--slow", "1"])
    job = TrainJob(seed=11, lr=0.5)
    life = engine_start(config, job, str(model), "abc")
    assert TrainJob.model_validate(life["job"]) == job
    assert life["job"]["seed"] == 11
    assert life["engines"]["seed"] == 7
    assert life["model"] == {"name": "my_model", "fingerprint": "abc"}
    assert {"python", "fakevllm"} <= life["versions"].keys()


def test_the_shipped_model_is_called_as_its_flag_calls_it(tmp_path: Path) -> None:
    config = ServerConfig("embedded", tmp_path / "run", model="demo")
    life = engine_start(config, TrainJob(), find_model("demo", False), "abc")
    assert life["model"]["name"] == "demo"


def test_versions_are_those_installed_and_load_nothing() -> None:
    found = versions()
    assert found["fakevllm"]
    assert all(found.values())


def test_no_key_no_address_and_no_folder_is_told(tmp_path: Path) -> None:
    config = ServerConfig(
        "vllm",
        tmp_path / "secret-folder",
        host="127.0.0.1",
        rollout_url="http://10.1.2.3:8000",
        rollout_key="sk-rollout",
        trainer_args=["--hf-token", "sk-one", "--other-key=sk-two", "--device=cpu"],
    )
    told = json.dumps(engine_start(config, TrainJob(), None, None), ensure_ascii=False)
    for secret in ("sk-", "10.1.2.3", "secret-folder", "127.0.0.1"):
        assert secret not in told
    assert HIDDEN in told and "--device=cpu" in told


def test_a_disk_that_does_not_take_it_stops_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run/run.json.tmp").mkdir()  # what is written first
    folder.record_engine_start(ONE)
    assert "run.json was not written" in caplog.text
    (tmp_path / "run/run.json.tmp").rmdir()
    folder.record_engine_start(ONE)
    folder.close()
    assert len(lives((tmp_path / "run/run.json").read_text())) == 1
