"""`run.json` has a run's settings and versions, but no addresses, folders or keys."""

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

FIRST: dict[str, Any] = {"job": {"lr": 1.0}}
OTHER: dict[str, Any] = {"job": {"lr": 2.0}}


def entries_of(text: str) -> list[dict[str, Any]]:
    return json.loads(text)["lives"]


def test_the_docstring_examples_hold() -> None:
    assert doctest.testmod(metadata).failed == 0


def test_a_start_with_new_settings_is_an_entry_and_a_repeated_start_adds_a_time() -> None:
    text = None
    for now, start in enumerate([FIRST, FIRST, OTHER, FIRST]):
        text = with_engine_start(text, "run-1", start, float(now))
    assert text is not None
    assert json.loads(text)["run_id"] == "run-1"
    assert [(one["job"]["lr"], len(one["started"])) for one in entries_of(text)] == [
        (1.0, 2),
        (2.0, 1),
        (1.0, 1),
    ]
    assert entries_of(text)[0]["started"] == ["1970-01-01T00:00:00Z", "1970-01-01T00:00:01Z"]


@pytest.mark.parametrize("known", ["", "{", "[]", '{"lives": 3}', '{"lives": [{"started": 1}]}'])
def test_an_unreadable_file_is_replaced(known: str) -> None:
    assert len(entries_of(with_engine_start(known, "run-1", FIRST, 0.0))) == 1


def test_an_engine_start_has_the_job_the_seeds_and_the_versions(tmp_path: Path) -> None:
    model = tmp_path / "my_model"
    model.mkdir()
    config = ServerConfig("fake", tmp_path / "run", seed=7, engine_args=["--slow", "1"])
    job = TrainJob(seed=11, lr=0.5)
    start = engine_start(config, job, str(model), "abc")
    assert TrainJob.model_validate(start["job"]) == job
    assert start["job"]["seed"] == 11
    assert start["engines"]["seed"] == 7
    assert start["model"] == {"name": "my_model", "fingerprint": "abc"}
    assert {"python", "fakevllm"} <= start["versions"].keys()


def test_the_name_of_the_shipped_model_is_demo(tmp_path: Path) -> None:
    config = ServerConfig("embedded", tmp_path / "run", model="demo")
    start = engine_start(config, TrainJob(), find_model("demo", False), "abc")
    assert start["model"]["name"] == "demo"


def test_the_versions_of_installed_packages_are_returned() -> None:
    installed = versions()
    assert installed["fakevllm"]
    assert all(installed.values())


def test_an_engine_start_has_no_key_no_address_and_no_folder(tmp_path: Path) -> None:
    config = ServerConfig(
        "vllm",
        tmp_path / "secret-folder",
        host="127.0.0.1",
        rollout_url="http://10.1.2.3:8000",
        rollout_key="sk-rollout",
        trainer_args=["--hf-token", "sk-one", "--other-key=sk-two", "--device=cpu"],
    )
    text = json.dumps(engine_start(config, TrainJob(), None, None), ensure_ascii=False)
    for secret in ("sk-", "10.1.2.3", "secret-folder", "127.0.0.1"):
        assert secret not in text
    assert HIDDEN in text and "--device=cpu" in text


def test_an_engine_starts_if_its_start_cannot_be_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run/run.json.tmp").mkdir()  # the temporary file
    folder.record_engine_start(FIRST)
    assert "run.json was not written" in caplog.text
    (tmp_path / "run/run.json.tmp").rmdir()
    folder.record_engine_start(FIRST)
    folder.close()
    assert len(entries_of((tmp_path / "run/run.json").read_text())) == 1
