"""Read a model folder's tokenizer. The tokenizer is used to find out why a model call does not
continue an earlier call of its session, and to show sampled texts in the trackers.

The tokenizer is read with the package `tokenizers`. Every engine that loads a real model on this
machine depends on this package. If the package or the folder's file `tokenizer.json` is missing,
only token ids are known.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakevllm_server.forest.call_text_comparison import Vocabulary

log = logging.getLogger("fakevllm.server")

TEXT = ("think", "tool_call", "tool_response")
"""Tags that count as text in a conversation, even if a tokenizer treats them as special tokens."""
MESSAGE_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>", "<|turn|>")
"""Special tokens with which chat templates begin a message."""


def load_vocabulary(model: str | None) -> Vocabulary:
    """Return the vocabulary of the model in a folder. Return an empty vocabulary if the folder's
    tokenizer cannot be read.

    Loading takes some tenths of a second. Decoding tokens is quick.
    """
    file = None if model is None else Path(model) / "tokenizer.json"
    if file is None or not file.is_file():
        return Vocabulary()
    # Catch all errors to isolate the step: without a vocabulary it only lacks some metrics, and a
    # table of samples.
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        return _vocabulary(tokenizer)
    except Exception as error:
        log.info("the tokenizer %s cannot be read, so token ids have no texts: %r", file, error)
        return Vocabulary()


def _vocabulary(tokenizer: Any) -> Vocabulary:
    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    special = {id: token.content for id, token in added.items() if token.special}
    marks = {id for id, content in special.items() if content.strip("</>") not in TEXT}
    starts = (id for id, content in special.items() if content in MESSAGE_STARTS)
    return Vocabulary(decode, frozenset(marks), next(starts, None))
