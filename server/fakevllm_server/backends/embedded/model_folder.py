"""Read and check a model folder in Hugging Face format.

No code from the folder is executed. Only the function `resolve_model_folder` may download files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from fakevllm_server.types.backend import BackendError

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
"""Settings that vLLM takes from generation_config.json (`--generation-config auto`), whatever the
value of `do_sample` is. vLLM also takes `repetition_penalty`, but this engine does not use it as a
default.
"""
BATCHABLE_LAYERS = frozenset({"full_attention", "attention", "sliding_attention"})
"""Layer types that the batched cache supports. Sliding layers are supported only if prompt and
completion together always fit into the window."""
DEFAULT_MAX_MODEL_LEN = 2048
"""Context length in tokens for a model whose config does not have `max_position_embeddings`."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder that passed the checks. The object does not contain the weights: each call of
    `load_weights` loads a new copy of them."""

    path: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    eos_ids: frozenset[int]
    default_sampling: dict[str, Any]

    def load_weights(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        return load_weights(self.path, dtype, device)


def resolve_model_folder(model: str, allow_hub: bool) -> Path:
    """Return the local folder of `model`. If `allow_hub` is true and `model` is not a local folder,
    download the model of this name from the Hugging Face hub first."""
    if not allow_hub or Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    # Only data is downloaded: no pickled weights and no code.
    return Path(
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])
    )


def open_model_folder(path: Path, max_model_len: int | None = None) -> ModelFolder:
    """Read and check a model folder, and return it. Raises BackendError if the folder cannot be
    used. The error message says how to fix the problem."""
    config = read_config(path)
    tokenizer: Any = _read("tokenizer", path, AutoTokenizer.from_pretrained)
    if not tokenizer.chat_template:
        raise BackendError(
            f"{path} has no chat template: add chat_template.jinja, or take its chat variant"
        )
    length = _length(path, config, max_model_len)
    _check_attention(path, config, length)
    generation = _generation_config(path)
    return ModelFolder(
        path=path,
        config=config,
        tokenizer=tokenizer,
        max_model_len=length,
        eos_ids=_eos_ids(generation, config, tokenizer),
        default_sampling={
            key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None
        },
    )


def read_config(path: Path) -> PreTrainedConfig:
    """Return the model config of a folder. Raises BackendError if the folder or its config.json
    does not exist or cannot be read."""
    transformers_logging.disable_progress_bar()
    if not path.is_dir():
        raise BackendError(
            f"model folder {path} does not exist: give --model a folder in Hugging Face form"
        )
    if not (path / "config.json").is_file():
        raise BackendError(f"{path} has no config.json: give --model a folder in Hugging Face form")
    return _read("config", path, AutoConfig.from_pretrained)


def load_weights(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load and return the model in evaluation mode. The model stays in evaluation mode during
    training, so dropout is never active. Raises BackendError if the weights cannot be loaded or are
    incomplete."""
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        loaded, info = load(
            path,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    # transformers raises any exception about a bad folder. The user needs the folder and the
    # reason.
    except Exception as error:
        raise BackendError(f"cannot load the weights in {path}: {_first_line(error)}") from error
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise BackendError(
            f"{path} lacks weights of its own config, {missing[0]} first of {len(missing)}"
        )
    return loaded.to(device).eval()


def _read(part: str, path: Path, load: Any) -> Any:
    try:
        return load(path, trust_remote_code=False, local_files_only=True)
    # transformers raises any exception about a bad folder. The user needs the folder and the
    # reason.
    except Exception as error:
        raise BackendError(f"cannot read the {part} in {path}: {_first_line(error)}") from error


def _length(path: Path, config: PreTrainedConfig, max_model_len: int | None) -> int:
    longest = (
        getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
    )
    if max_model_len is not None and max_model_len > longest:
        raise BackendError(
            f"--max-model-len {max_model_len} is more than {path} was made for: at most {longest}"
        )
    return max_model_len or longest


def _check_attention(path: Path, config: PreTrainedConfig, max_model_len: int) -> None:
    """Check that the model has plain causal attention, which batched decoding needs. Raises
    BackendError otherwise. This check reads only the config. Later, the decoding check at start-up
    finds unsuitable models that passed this check."""
    if config.is_encoder_decoder:
        raise BackendError(f"{path} is an encoder-decoder: give --model a decoder-only model")
    text: Any = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    others = sorted(kinds - BATCHABLE_LAYERS)
    if others:
        raise BackendError(
            f"{path} has layers of type {', '.join(others)}: the embedded engine serves full "
            "attention in all layers; choose another --model"
        )
    window = getattr(text, "sliding_window", None)
    slides = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    if slides and window and max_model_len > window:
        raise BackendError(
            f"{path} attends within {window} tokens: start with --max-model-len {window}"
        )


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        loaded: Any = json.loads(file.read_text())
    except ValueError as error:
        raise BackendError(f"{file} is no JSON: {error}") from error
    return loaded


def _eos_ids(
    generation: dict[str, Any], config: PreTrainedConfig, tokenizer: Any
) -> frozenset[int]:
    ids: set[int] = set()
    for value in (
        generation.get("eos_token_id"),
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
