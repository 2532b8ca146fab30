"""The texts of tokens: by a model folder's tokenizer, or by the engine that is running."""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.keys import bearer_header

TIMEOUT_S = 10.0
AT_ONCE = 8
Texts = Mapping[int, str]


class NoTexts(Exception):
    """Why ids are all there is, and what to do."""


def of_folder(model: Path, ids: Collection[int]) -> Texts:
    """Raises ConfigError for a folder without a tokenizer, NoTexts where the package is missing."""
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{model} holds no tokenizer.json: name the served model's folder.")
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise NoTexts("for texts: pip install tokenizers") from None
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # translates: the package raises nothing narrower
        raise ConfigError(f"{file} cannot be read: {error}.") from None
    # From the vocabulary where decoding one token alone would lose its space.
    return {id: _decoded(tokenizer, id) for id in set(ids)}


def _decoded(tokenizer: Any, id: int) -> str:
    name: str | None = tokenizer.id_to_token(id)
    text: str = tokenizer.decode([id], skip_special_tokens=False)
    return f" {text}" if name is not None and name.startswith("▁") and text[:1] != " " else text


def of_engine(swarm: str, key: str | None, ids: Collection[int]) -> Texts:
    """Asked one by one, for a text of several cannot be taken apart. Raises NoTexts."""

    def text(id: int) -> str:
        body = json.dumps({"tokens": [id]}).encode()
        headers = {"Content-Type": "application/json", **bearer_header(key)}
        request = urllib.request.Request(f"{swarm.rstrip('/')}/detokenize", body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)["prompt"]

    wanted = sorted(set(ids))
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(wanted, pool.map(text, wanted), strict=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = getattr(error, "reason", error)
        raise NoTexts(
            f"ids without texts, for no engine tells them at {swarm} ({cause}): name the model's "
            "folder with --model"
        ) from None
