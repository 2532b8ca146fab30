"""Which models are the same model for a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fakevllm_server.config.model import ConfigError
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.model_identity import (
    SAMPLE_BYTES,
    identify,
    read_recorded_model,
)

NUM_BYTES = 5 * SAMPLE_BYTES
"""Size of each of the two tensors of a model."""


def make_model(folder: Path, first: bytes = b"a", second: bytes = b"b") -> str:
    """Write a model of two tensors, whose bytes are all the same."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    offsets = {"one": [0, NUM_BYTES], "two": [NUM_BYTES, 2 * NUM_BYTES]}
    entries = {
        name: {"dtype": "U8", "shape": [NUM_BYTES], "data_offsets": span}
        for name, span in offsets.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    content = len(header).to_bytes(8, "little") + header + first * NUM_BYTES + second * NUM_BYTES
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("changed", [(b"x", b"b"), (b"a", b"x")], ids=["first", "second"])
def test_a_model_of_the_same_size_with_other_values_in_one_tensor_is_another_model(
    tmp_path: Path, changed: tuple[bytes, bytes]
) -> None:
    mine, other = make_model(tmp_path / "mine"), make_model(tmp_path / "other", *changed)
    assert identify(mine).shape == identify(other).shape
    assert identify(mine).fingerprint != identify(other).fingerprint


def test_a_copy_of_a_model_has_its_fingerprint(tmp_path: Path) -> None:
    mine = make_model(tmp_path / "mine")
    copy = shutil.copytree(mine, tmp_path / "copy")
    assert identify(str(copy)).fingerprint == identify(mine).fingerprint


def test_weights_in_another_format_are_told_apart_by_their_first_and_last_bytes(
    tmp_path: Path,
) -> None:
    fingerprints = set[str | None]()
    for number, content in enumerate((b"", b"1", b"2", b"\xff" * 9000, b"\xff" * 8999 + b"a")):
        model = Path(make_model(tmp_path / str(number)))
        (model / "model.safetensors").write_bytes(content)
        fingerprints.add(identify(str(model)).fingerprint)
    assert len(fingerprints) == 5


def test_a_hub_name_is_its_own_fingerprint() -> None:
    assert identify("org/model").fingerprint == "org/model"
    assert identify(None).fingerprint is None


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = Path(make_model(tmp_path / "mine"))
    (model / "config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"mine cannot be read"):
        identify(str(model))


def write_old_record(run_dir: Path, model: str) -> None:
    """Write `model.json` as servers up to version 0.2 did."""
    run_dir.mkdir()
    content = {"backend": "embedded", "model": model, "fingerprint": identify(model).shape}
    (run_dir / "model.json").write_text(json.dumps(content))


def test_a_run_of_an_older_server_continues_with_its_model_and_then_knows_its_weights(
    tmp_path: Path,
) -> None:
    mine = make_model(tmp_path / "mine")
    copy = str(shutil.copytree(mine, tmp_path / "copy"))
    other = identify(make_model(tmp_path / "other", b"x"))
    write_old_record(tmp_path / "run", mine)
    folder = RunFolder(tmp_path / "run")
    folder.check_model("embedded", identify(copy))
    with pytest.raises(ConfigError, match=r"belongs to a run of .*mine"):
        folder.check_model("embedded", other)
    shutil.rmtree(mine)  # the model was moved
    folder.check_model("embedded", identify(copy))
    folder.record_model("embedded", identify(copy))
    with pytest.raises(ConfigError, match=r"belongs to a run of .*copy"):
        folder.check_model("embedded", other)
    recorded = read_recorded_model(tmp_path / "run")
    assert recorded is not None and recorded.fingerprint == identify(copy).fingerprint
    folder.close()


def test_a_folder_whose_weights_were_replaced_is_refused_with_the_reason(tmp_path: Path) -> None:
    mine = make_model(tmp_path / "mine")
    folder = RunFolder(tmp_path / "run")
    folder.record_model("embedded", identify(mine))
    shutil.rmtree(mine)
    make_model(tmp_path / "mine", b"x")
    with pytest.raises(ConfigError, match=r"belongs to a run of other weights of .*mine"):
        folder.check_model("embedded", identify(mine))
    folder.close()
