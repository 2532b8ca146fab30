from pathlib import Path

from fakevllm_server.checkpoints import KEEP, Checkpoints


async def save(folder: Path) -> None:
    (folder / "theta.json").write_text("{}")


async def test_the_newest_are_kept_with_their_version_and_groups(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 6):
        await checkpoints.write(step, step + 10, ["a"], save)
    found = checkpoints.newest_first()
    assert [checkpoint.step for checkpoint in found] == [5, 4, 3] and KEEP == 3
    assert (found[0].version, found[0].consumed) == (15, ["a"])
    assert len(list(tmp_path.iterdir())) == KEEP


async def test_a_checkpoint_being_written_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    half = tmp_path / "step-00000009.tmp"
    half.mkdir()
    (half / "state.json").write_text('{"step": 9, "version": 9, "consumed_groups": []}')
    assert checkpoints.is_empty and checkpoints.newest_first() == []


async def test_one_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        await checkpoints.write(step, step, [], save)
    (tmp_path / "step-00000002" / "state.json").write_bytes(b'{"step": 2')
    assert [checkpoint.step for checkpoint in checkpoints.newest_first()] == [1]
    assert not checkpoints.is_empty
