import errno
from pathlib import Path

import pytest

from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.run.checkpoints import CheckpointFolders


async def save(folder: Path) -> None:
    (folder / "theta.json").write_text("{}")


async def written(folders: CheckpointFolders, step: int) -> SavedCheckpoint:
    folder, digest = await folders.write(step, save)
    return SavedCheckpoint(step, folder, step, digest, None)


async def test_a_written_checkpoint_is_found_unchanged(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    folder = folders.find(await written(folders, 7))
    assert (folder / "theta.json").read_text() == "{}"
    assert folder.name == "step-00000007"


async def test_folders_that_the_journal_does_not_know_are_deleted(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    for step in (1, 2):
        await written(folders, step)
    (tmp_path / "step-00000009.tmp").mkdir()
    folders.delete_except(["step-00000002"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


async def test_a_file_among_the_checkpoints_is_deleted(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        folders.delete_except([])
        assert list(tmp_path.iterdir()) == []


async def test_a_failed_deletion_is_logged_and_the_others_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folders = CheckpointFolders(tmp_path)
    one, other = [await written(folders, step) for step in (1, 2)]
    rename = Path.rename

    def is_busy(path: Path, to: Path) -> Path:
        if path.name == one.folder:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", is_busy)
    folders.delete_except([])
    assert [path.name for path in tmp_path.iterdir()] == [one.folder]
    assert f"{tmp_path / one.folder} cannot be removed: Device or resource busy" in caplog.messages
    assert not (tmp_path / other.folder).exists()


async def test_the_checkpoint_of_a_rolled_back_step_is_replaced(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    await written(folders, 1)
    again = await written(folders, 1)
    assert folders.find(again).name == again.folder
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["change", "cut", "add", "remove", "rename"])
async def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    folders = CheckpointFolders(tmp_path)
    saved = await written(folders, 1)
    file = tmp_path / saved.folder / "theta.json"
    match damage:
        case "change":
            file.write_text("[]")
        case "cut":
            file.write_text("")
        case "add":
            (file.parent / "more").write_text("")
        case "remove":
            file.unlink()
        case _:
            file.rename(file.with_name("other"))
    with pytest.raises(OSError, match="is damaged"):
        folders.find(saved)
