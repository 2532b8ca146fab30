"""Tests of the check for missing files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from fakevllm_server.backends.verl.checkpoint_files import check_files
from fakevllm_server.backends.verl.trainer_arguments import STATE_FOLDER
from fakevllm_server.types.backend import BackendError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save({"weights.a": torch.ones(3)}, checkpoint_id=tmp_path / STATE_FOLDER, no_dist=True)
    return tmp_path


def test_a_complete_checkpoint_passes(checkpoint: Path) -> None:
    check_files(checkpoint)


def test_a_checkpoint_without_the_files_of_a_worker_is_refused(checkpoint: Path) -> None:
    (file,) = (checkpoint / STATE_FOLDER).glob("*.distcp")
    file.unlink()
    with pytest.raises(BackendError, match=f"lacks 1 of 1 files, such as {file.name}: .*--run-dir"):
        check_files(checkpoint)


@pytest.mark.parametrize("content", [None, b"", b"no pickle"])
def test_a_checkpoint_with_an_unreadable_list_is_refused(
    checkpoint: Path, content: bytes | None
) -> None:
    file = checkpoint / STATE_FOLDER / ".metadata"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BackendError, match=r"^checkpoint .* cannot be read: "):
        check_files(checkpoint)
