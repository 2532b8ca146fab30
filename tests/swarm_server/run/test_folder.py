from pathlib import Path

import pytest

from fakevllm_server.config.model import ConfigError
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.model_identity import ModelIdentity, identify


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


def model_folder(tmp_path: Path, name: str, config: str = "{}") -> ModelIdentity:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"1234")
    return identify(str(folder))


def test_a_run_continues_with_its_own_model_and_refuses_another(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    mine = model_folder(tmp_path, "mine")
    folder.check_model("embedded", mine)
    folder.record_model("embedded", mine)
    folder.check_model("embedded", mine)
    other = model_folder(tmp_path, "other", '{"layers": 2}')
    for backend, model in (("embedded", other), ("fake", identify(None)), ("fake", mine)):
        with pytest.raises(ConfigError, match=r"belongs to a run of .*mine: choose another"):
            folder.check_model(backend, model)
    folder.close()


def test_a_copy_of_a_model_is_the_same_model(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.record_model("embedded", model_folder(tmp_path, "mine"))
    folder.check_model("embedded", model_folder(tmp_path, "copy"))
    folder.close()


def test_a_run_keeps_its_id_and_an_empty_id_file_is_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = folder.run_id()
    assert first and folder.run_id() == first
    (tmp_path / "run_id").write_text("")  # as after a write to a full disk
    assert folder.run_id() == folder.run_id() != ""
    folder.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_full_disk_leaves_no_partly_written_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    mine = model_folder(tmp_path, "mine")
    for name in ("model.json", "run_id"):
        (tmp_path / "run" / f"{name}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        folder.record_model("embedded", mine)
    with pytest.raises(OSError, match="No space left"):
        folder.run_id()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "lock",
        "model.json.tmp",
        "run_id.tmp",
    ]
    folder.check_model("embedded", mine)  # the run has not recorded a model
    folder.close()
