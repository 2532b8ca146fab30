"""The chat template and the default sampling of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakevllm_server.backends.vllm.model_folder import (
    read_chat_template,
    read_default_sampling,
    read_num_layers,
)

GENERATION = {"temperature": 0.6, "top_k": 20, "eos_token_id": 2, "do_sample": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path


def test_the_default_sampling_is_that_of_the_models_generation_config(folder: Path) -> None:
    assert read_default_sampling(str(folder), {}) == {"temperature": 0.6, "top_k": 20}


def test_a_generation_config_of_the_user_overrides_the_models(folder: Path) -> None:
    assert read_default_sampling(str(folder), {"generation-config": "vllm"}) == {}
    other = folder / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"min_p": 0.1}')
    assert read_default_sampling(str(folder), {"generation-config": str(other)}) == {"min_p": 0.1}
    overridden = read_default_sampling(
        str(folder), {"override-generation-config": '{"temperature": 1.0}'}
    )
    assert overridden == {"temperature": 1.0, "top_k": 20}


@pytest.mark.parametrize("model", [None, "org/name-on-the-hub"])
def test_a_model_from_the_hub_gives_no_template_and_no_sampling(model: str | None) -> None:
    assert read_default_sampling(model, {}) == {}
    assert read_chat_template(model, {}) is None


def test_an_invalid_generation_config_is_ignored_because_vllm_refuses_it(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert read_default_sampling(str(folder), {}) == {}


def test_the_template_is_read_from_its_file_or_from_the_tokenizer_config(folder: Path) -> None:
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text('{"chat_template": "in the tokenizer"}')
    assert read_chat_template(str(folder), {}) == "in the tokenizer"
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokenizer.write_text(json.dumps({"chat_template": several}))
    assert read_chat_template(str(folder), {}) == "a\nb"
    (folder / "chat_template.jinja").write_text("in its file")
    assert read_chat_template(str(folder), {}) == "in its file"


def test_a_template_of_the_user_wins_as_a_file_or_as_text(folder: Path) -> None:
    (folder / "own.jinja").write_text("own")
    assert read_chat_template(str(folder), {"chat-template": str(folder / "own.jinja")}) == "own"
    assert read_chat_template(str(folder), {"chat-template": "{{ messages }}"}) == "{{ messages }}"


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [
        ({"num_hidden_layers": 4}, 4),
        ({"num_hidden_layers": 4, "text_config": {"num_hidden_layers": 9}}, 9),
        ({"n_layer": 4}, None),
    ],
)
def test_the_number_of_layers_is_that_of_the_models_text_part(
    folder: Path, config: object, num_layers: int | None
) -> None:
    assert read_num_layers(str(folder)) is read_num_layers(None) is None
    (folder / "config.json").write_text(json.dumps(config))
    assert read_num_layers(str(folder)) == num_layers
