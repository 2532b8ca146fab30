"""What is read from vLLM's model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakevllm_server.backends.vllm.model_folder import chat_template, default_sampling

GENERATION = {"temperature": 0.6, "top_k": 20, "eos_token_id": 2, "do_sample": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path


def test_what_samples_where_a_request_is_silent_is_the_models_own(folder: Path) -> None:
    assert default_sampling(str(folder), {}) == {"temperature": 0.6, "top_k": 20}


def test_the_users_own_generation_config_wins(folder: Path) -> None:
    assert default_sampling(str(folder), {"generation-config": "vllm"}) == {}
    other = folder / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"min_p": 0.1}')
    assert default_sampling(str(folder), {"generation-config": str(other)}) == {"min_p": 0.1}
    overridden = default_sampling(
        str(folder), {"override-generation-config": '{"temperature": 1.0}'}
    )
    assert overridden == {"temperature": 1.0, "top_k": 20}


@pytest.mark.parametrize("model", [None, "org/name-on-the-hub"])
def test_a_model_from_the_hub_tells_nothing(model: str | None) -> None:
    assert default_sampling(model, {}) == {}
    assert chat_template(model, {}) is None


def test_a_broken_generation_config_is_left_to_vllm_to_refuse(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert default_sampling(str(folder), {}) == {}


def test_the_template_is_found_in_its_file_or_in_the_tokenizers(folder: Path) -> None:
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text('{"chat_template": "in the tokenizer"}')
    assert chat_template(str(folder), {}) == "in the tokenizer"
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokenizer.write_text(json.dumps({"chat_template": several}))
    assert chat_template(str(folder), {}) == "a\nb"
    (folder / "chat_template.jinja").write_text("in its file")
    assert chat_template(str(folder), {}) == "in its file"


def test_the_users_own_template_wins_as_a_file_or_as_text(folder: Path) -> None:
    (folder / "own.jinja").write_text("own")
    assert chat_template(str(folder), {"chat-template": str(folder / "own.jinja")}) == "own"
    assert chat_template(str(folder), {"chat-template": "{{ messages }}"}) == "{{ messages }}"
