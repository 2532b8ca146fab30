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


async def test_what_was_written_is_found_as_it_was(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    folder = folders.find(await written(folders, 7))
    assert (folder / "theta.json").read_text() == "{}"
    assert folder.name == "step-00000007"


async def test_only_those_the_journal_knows_stay(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    for step in (1, 2):
        await written(folders, step)
    (tmp_path / "step-00000009.tmp").mkdir()
    folders.sweep(["step-00000002"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


async def test_a_file_that_somebody_left_there_goes_as_well(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        folders.sweep([])
        assert list(tmp_path.iterdir()) == []


async def test_what_cannot_be_removed_is_told_and_stops_nothing(
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
    folders.sweep([])
    assert [path.name for path in tmp_path.iterdir()] == [one.folder]
    assert f"{tmp_path / one.folder} cannot be removed: Device or resource busy" in caplog.messages
    assert not (tmp_path / other.folder).exists()


async def test_a_step_that_was_undone_is_written_anew(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    await written(folders, 1)
    again = await written(folders, 1)
    assert folders.find(again).name == again.folder
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["change", "cut", "add", "remove", "rename"])
async def test_one_that_is_not_what_was_written_is_refused(tmp_path: Path, damage: str) -> None:
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
    with pytest.raises(OSError, match="is not what was written"):
        folders.find(saved)
