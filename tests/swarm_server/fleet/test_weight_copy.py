"""Tests of the copy of the current weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm_server.fleet.weight_copy import WeightCopy


def weights(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "weights.txt").write_text(text)
    return folder


async def test_the_kept_weights_stay_after_their_source_is_removed(tmp_path: Path) -> None:
    copy = WeightCopy(tmp_path / "kept")
    for version, text in ((1, "first"), (2, "second")):
        source = weights(tmp_path / text, text)
        await copy.keep(source, version)
        (source / "weights.txt").unlink()
        assert (copy.folder / "weights.txt").read_text() == text
        assert copy.version == version
    await copy.remove()
    assert (copy.version, copy.folder.exists()) == (None, False)


async def test_a_copy_that_fails_leaves_the_earlier_weights(tmp_path: Path) -> None:
    copy = WeightCopy(tmp_path / "kept")
    await copy.keep(weights(tmp_path / "first", "first"), 1)
    with pytest.raises(OSError, match="missing"):
        await copy.keep(tmp_path / "missing", 2)
    assert copy.version == 1
    assert (copy.folder / "weights.txt").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "kept"]
