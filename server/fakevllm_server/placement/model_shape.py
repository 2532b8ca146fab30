"""The shape of a model, from the `config.json` of its folder: number of parameters, and the sizes
from which activations and caches follow.

Only dense decoders of known families are read, because the number of parameters of any other model
would be a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fakevllm_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of a family have beyond the weight matrices that all of them have."""

    has_qkv_bias: bool = False
    """Whether query, key and value projections always have a bias."""
    reads_attention_bias: bool = False
    """Whether `attention_bias` in config.json adds a bias to all four attention projections."""
    reads_mlp_bias: bool = False
    """Whether `mlp_bias` in config.json adds a bias to the three projections of the MLP."""
    has_qk_norm: bool = False
    """Whether queries and keys are normalized in each layer."""
    default_head_dim: int | None = None
    """Size of a head if config.json has none; None means hidden size / number of heads."""


FAMILIES = {
    "llama": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(reads_attention_bias=True, has_qk_norm=True, default_head_dim=128),
}
"""The known families, by `model_type` in config.json."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder."""

    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    is_tied: bool
    """Whether the LM head shares its weight with the embedding."""
    has_attention_bias: bool = False
    has_mlp_bias: bool = False

    @property
    def query_size(self) -> int:
        """Number of values of a token's queries in one layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of values of a token's keys in one layer. Values have the same size."""
        return self.num_kv_heads * self.head_dim

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer in one layer of the model, by name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.query_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.query_size, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        qkv = self.query_size + 2 * self.kv_size
        total = sum(inputs * outputs for inputs, outputs in self.linear_sizes.values())
        total += 2 * hidden  # the two norms
        if self.family.has_qkv_bias:
            total += qkv
        if self.has_attention_bias:
            total += qkv + hidden
        if self.has_mlp_bias:
            total += 2 * inner + hidden
        if self.family.has_qk_norm:
            total += 2 * self.head_dim
        return total

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding. The LM head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model. A shared weight counts once."""
        embeddings = self.embedding_parameters * (1 if self.is_tied else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden_size

    @property
    def largest_tensor(self) -> int:
        """Number of parameters of the largest weight."""
        matrices = (inputs * outputs for inputs, outputs in self.linear_sizes.values())
        return max(self.embedding_parameters, *matrices)

    def adapter_parameters(self, rank: int, target_modules: str) -> int:
        """Return the number of parameters of LoRA adapters. `target_modules` are names of linear
        layers, or `all-linear`. Raises ConfigError for an unknown name."""
        sizes = self.linear_sizes
        if target_modules == "all-linear":
            return rank * self.num_layers * sum(map(sum, sizes.values()))
        total = 0
        for name in {part.strip().rpartition(".")[2] for part in target_modules.split(",")}:
            if name == "lm_head":
                total += rank * (self.hidden_size + self.vocab_size)
            elif name in sizes:
                total += rank * self.num_layers * sum(sizes[name])
            else:
                raise ConfigError(
                    f"target_modules names {name!r}, no linear layer of this model: it has "
                    f"{', '.join(sizes)}."
                )
        return total


def read_model_shape(model: Path) -> ModelShape:
    """Return the shape of the model in the folder `model`. Only its config.json is read. Raises
    ConfigError if the file cannot be read, or has a model whose size cannot be calculated."""
    file = model / "config.json"
    try:
        settings: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}): name a model folder with --model."
        ) from None
    except ValueError:
        raise ConfigError(f"{file} is not valid JSON: name a model folder with --model.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} is not a JSON object: name a model folder with --model.")
    return model_shape(cast("dict[str, Any]", settings), str(file))


def model_shape(settings: Mapping[str, Any], source: str) -> ModelShape:
    """Return the shape that the settings of a config.json describe. `source` names the file in
    messages. Raises ConfigError if the size of the model cannot be calculated."""
    model_type = settings.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{source}: the memory of the model type {model_type!r} cannot be calculated; known "
            f"are {', '.join(FAMILIES)} (no mixtures of experts): remove cluster.gpu_memory_gib to "
            "start without the check."
        )
    family = FAMILIES[model_type]

    def size(key: str, default: int | None = None) -> int:
        value = settings.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{source}: {key} must be a number of 1 or more, got {value!r}.")
        return value

    hidden, num_heads = size("hidden_size"), size("num_attention_heads")
    return ModelShape(
        family,
        hidden,
        size("num_hidden_layers"),
        num_heads,
        size("num_key_value_heads", num_heads),
        size("head_dim", family.default_head_dim or hidden // num_heads),
        size("intermediate_size"),
        size("vocab_size"),
        size("max_position_embeddings"),
        is_tied=settings.get("tie_word_embeddings") is True,
        has_attention_bias=family.reads_attention_bias and settings.get("attention_bias") is True,
        has_mlp_bias=family.reads_mlp_bias and settings.get("mlp_bias") is True,
    )
