"""Which models a job may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm_server.config.job_model import choose_model
from fakevllm_server.config.model import ConfigError


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("models/a", "models/Qwen/b", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models/link").symlink_to(tmp_path / "outside")
    (tmp_path / "models/loop").symlink_to(tmp_path / "models/loop")
    (tmp_path / "models/alias").symlink_to(tmp_path / "models/a")
    (tmp_path / "models/file").write_text("")
    return tmp_path / "models"


@pytest.mark.parametrize("name", ["a", "Qwen/b", "./a", "a/", "Qwen/../a"])
def test_a_job_names_a_folder_below_models_dir(models: Path, name: str) -> None:
    chosen = choose_model(name, None, models, has_keys=True)
    assert chosen == str((models / name).resolve())


def test_a_job_may_name_the_whole_path_or_a_link_that_stays_below_models_dir(models: Path) -> None:
    for name in (str(models / "a"), "alias"):
        assert choose_model(name, None, models, has_keys=True) == str((models / "a").resolve())


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "../outside",
        "link",
        "loop",
        "file",
        "missing",
        "a/../../outside",
        "/",
        "a\0b",
    ],
)
def test_no_job_names_anything_outside_of_models_dir(models: Path, name: str) -> None:
    for job_model in (name, str(models / name)):
        with pytest.raises(ConfigError, match="is not a folder below the server's --models-dir"):
            choose_model(job_model, None, models, has_keys=False)


def test_models_dir_itself_may_be_a_link(models: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(models)
    chosen = choose_model("a", None, tmp_path / "short", has_keys=True)
    assert chosen == str((models / "a").resolve())


def test_the_servers_own_model_may_be_named_or_left_out(models: Path, tmp_path: Path) -> None:
    own = str(tmp_path / "outside")
    for job_model in (None, own, f"{own}/."):
        assert choose_model(job_model, own, models, has_keys=True) == own
    assert choose_model("demo", "demo", models, has_keys=True) == "demo"
    with pytest.raises(ConfigError, match="or leave it out for the server's --model"):
        choose_model("missing", own, models, has_keys=True)


def test_without_models_dir_the_flag_model_overrides_the_job() -> None:
    assert choose_model("theirs", "own", None, has_keys=True) == "own"


def test_without_both_flags_only_a_server_without_keys_loads_the_model_of_a_job() -> None:
    assert choose_model("theirs", None, None, has_keys=False) == "theirs"
    assert choose_model(None, None, None, has_keys=True) is None
    with pytest.raises(ConfigError, match="start the server with --models-dir DIR"):
        choose_model("theirs", None, None, has_keys=True)
