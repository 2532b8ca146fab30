"""Look up the texts of token ids, either with the tokenizer in a model folder or by requests to the
running engine."""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.keys import bearer_header

TIMEOUT_S = 10.0
MAX_PARALLEL_REQUESTS = 8
TokenTexts = Mapping[int, str]
"""Texts by token id. An id without a text is shown as a number."""


class TextsUnavailable(Exception):
    """Raised if the texts of tokens cannot be looked up. The message contains the reason, and what
    the user can do."""


def texts_from_folder(model: Path, ids: Collection[int]) -> TokenTexts:
    """Return the texts of token ids, looked up with the tokenizer in a model folder.

    Raises ConfigError if the folder has no readable tokenizer. Raises TextsUnavailable if the
    package tokenizers is not installed.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"The folder {model} has no tokenizer.json: name the served model's folder."
        )
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise TextsUnavailable(
            "Texts are missing: the package tokenizers is not installed; pip install tokenizers"
        ) from None
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # translated: the package has no narrower exception
        raise ConfigError(f"{file} cannot be read: {error}.") from None
    return {id: _decode(tokenizer, id) for id in set(ids)}


def _decode(tokenizer: Any, id: int) -> str:
    """Return the text of a token. If the token's name in the vocabulary begins with ▁ (a space),
    the text begins with a space.

    The tokenizer itself drops this space when it decodes a single token.
    """
    name: str | None = tokenizer.id_to_token(id)
    text: str = tokenizer.decode([id], skip_special_tokens=False)
    return f" {text}" if name is not None and name.startswith("▁") and text[:1] != " " else text


def texts_from_engine(
    swarm: str, key: str | None, ids: Collection[int], max_s: float | None = None
) -> TokenTexts:
    """Return the texts of token ids. The running engine of the server at `swarm` decodes them.
    After `max_s` seconds, return the texts that have arrived by then.

    One request is sent for each id, because the joint text of several tokens cannot be split into
    the texts of the tokens. Raises TextsUnavailable if a request fails.
    """

    def fetch_text(id: int) -> str:
        body = json.dumps({"tokens": [id]}).encode()
        headers = {"Content-Type": "application/json", **bearer_header(key)}
        request = urllib.request.Request(f"{swarm.rstrip('/')}/detokenize", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return json.load(reply)["prompt"]
        except HTTPError as error:
            error.close()  # it has the connection
            raise

    pool = ThreadPoolExecutor(MAX_PARALLEL_REQUESTS)
    futures = {id: pool.submit(fetch_text, id) for id in sorted(set(ids))}
    try:
        done = wait(futures.values(), max_s, FIRST_EXCEPTION).done
        return {id: future.result() for id, future in futures.items() if future in done}
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = getattr(error, "reason", error)
        raise TextsUnavailable(
            f"Texts are missing: no engine at {swarm} returned them ({cause}). Name the model's "
            "folder with --model."
        ) from None
    finally:
        # Nobody waits for the requests that have begun. Each of them has a timeout.
        pool.shutdown(wait=False, cancel_futures=True)
