from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from fakevllm_server.backends.embedded.model_folder import open_model_folder
from fakevllm_server.types.backend import BackendError


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder, tmp_path / "model"))


def change(file: Path, **values: Any) -> None:
    loaded = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(loaded | values))


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(BackendError, match=r"/no/such/model does not exist: give --model"):
        open_model_folder(Path("/no/such/model"))


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()

    with pytest.raises(BackendError, match=r"has no config\.json"):
        open_model_folder(folder)


def test_a_folder_without_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()

    with pytest.raises(BackendError, match="has no chat template: add"):
        open_model_folder(folder)


def test_an_unreadable_config_is_refused_in_one_line(folder: Path) -> None:
    (folder / "config.json").write_text("{")

    with pytest.raises(BackendError, match="cannot read the config") as caught:
        open_model_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_model_that_brings_its_own_code_is_refused(folder: Path) -> None:
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change(folder / "config.json", model_type="own", auto_map=code)
    (folder / "own.py").write_text("raise SystemExit('must not run')")

    with pytest.raises(BackendError, match="cannot read the config"):
        open_model_folder(folder)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layers of type linear_attention.*choose another --model",
        ),
        ({"model_type": "t5", "layer_types": None}, "encoder-decoder"),
    ],
)
def test_attention_that_cannot_be_batched_is_refused(
    folder: Path, values: dict[str, Any], reason: str
) -> None:
    change(folder / "config.json", **values)

    with pytest.raises(BackendError, match=reason):
        open_model_folder(folder)


def test_a_sliding_window_is_refused_unless_no_completion_exceeds_it(folder: Path) -> None:
    MistralConfig(sliding_window=64).save_pretrained(folder)

    with pytest.raises(BackendError, match="start with --max-model-len 64"):
        open_model_folder(folder)
    assert open_model_folder(folder, max_model_len=64).max_model_len == 64


def test_a_window_in_some_layers_counts_too(folder: Path) -> None:
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    change(
        folder / "config.json", layer_types=layer_types, use_sliding_window=True, sliding_window=64
    )

    with pytest.raises(BackendError, match="start with --max-model-len 64"):
        open_model_folder(folder)


def test_more_positions_than_the_model_has_are_refused(folder: Path) -> None:
    with pytest.raises(BackendError, match=r"--max-model-len 513 is more than .* at most 512"):
        open_model_folder(folder, max_model_len=513)


def test_default_sampling_follows_the_generation_config_whatever_do_sample(
    folder: Path,
) -> None:
    change(folder / "generation_config.json", temperature=0.7, top_p=0.8, top_k=20, do_sample=False)

    assert open_model_folder(folder).default_sampling == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
    }


def test_every_configured_end_of_sequence_token_counts(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[0, 5])

    assert open_model_folder(folder).eos_ids == {0, 2, 5}


def test_a_folder_without_generation_config_samples_plainly(folder: Path) -> None:
    (folder / "generation_config.json").unlink()

    assert open_model_folder(folder).default_sampling == {}
