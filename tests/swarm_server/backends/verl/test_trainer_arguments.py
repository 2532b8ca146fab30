"""The arguments of a verl trainer that only exports a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.backends.verl.trainer_arguments import (
    arguments_for_checkpoint,
    write_settings,
)

LORA = LoraSettings(4, 8, "q_proj")


@pytest.mark.parametrize("lora", [None, LORA])
def test_an_export_has_at_most_as_many_workers_as_saved_the_checkpoint(
    tmp_path: Path, lora: LoraSettings | None
) -> None:
    write_settings(tmp_path, 3, lora)
    adapters = (
        [] if lora is None else ["--lora-rank=4", "--lora-alpha=8", "--target-modules=q_proj"]
    )
    expected = ["--num-workers=3", "--min-workers=1", *adapters]
    assert arguments_for_checkpoint(tmp_path) == expected


def test_the_number_of_workers_of_a_checkpoint_of_version_0_8_0_is_known(tmp_path: Path) -> None:
    released = {"FSDP_version": 2, "world_size": 4}
    (tmp_path / "fsdp_config.json").write_text(json.dumps(released))
    assert arguments_for_checkpoint(tmp_path) == ["--num-workers=4", "--min-workers=1"]
