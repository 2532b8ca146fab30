from pathlib import Path

import pytest

from fakevllm_server.config import ConfigError
from fakevllm_server.run_folder import RunFolder


def test_a_second_server_on_the_same_folder_is_refused_until_the_first_has_closed(
    tmp_path: Path,
) -> None:
    first = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="is used by another server: choose another --run-dir"):
        RunFolder(tmp_path / "run")
    first.close()
    RunFolder(tmp_path / "run").close()


def test_a_folder_that_existed_becomes_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    RunFolder(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700


def model_folder(tmp_path: Path, name: str, config: str = "{}") -> str:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"1234")
    return str(folder)


def test_a_run_goes_on_with_its_own_model_and_refuses_another(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    mine = model_folder(tmp_path, "mine")
    folder.check_model("embedded", mine)
    folder.remember_model("embedded", mine)
    folder.check_model("embedded", mine)
    other = model_folder(tmp_path, "other", '{"layers": 2}')
    for backend, model in (("embedded", other), ("fake", None), ("fake", mine)):
        with pytest.raises(ConfigError, match=r"belongs to a run of .*mine: choose another"):
            folder.check_model(backend, model)
    folder.close()


def test_a_copy_of_a_model_is_the_same_model(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.remember_model("embedded", model_folder(tmp_path, "mine"))
    folder.check_model("embedded", model_folder(tmp_path, "copy"))
    folder.close()
