"""What the model's own folder says of its tokens, for naming why sessions branch.

Read with the package `tokenizers`, which comes with every engine that samples or trains here. Where
it or the folder's file is missing, nothing is known but ids.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakevllm_server.forest.history import Vocabulary

log = logging.getLogger("fakevllm.server")

TEXT = ("think", "tool_call", "tool_response")
"""Tags that are text to a history, whether or not a tokenizer calls them special."""
MESSAGE_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>", "<|turn|>")


def vocabulary_of(model: str | None) -> Vocabulary:
    """Of a model folder. Reading one takes some tenths of a second; decoding is quick."""
    file = None if model is None else Path(model) / "tokenizer.json"
    if file is None or not file.is_file():
        return Vocabulary()
    # Isolated: names of causes are not worth a step.
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        return _vocabulary(tokenizer)
    except Exception as error:
        log.info("why sessions branch is told from ids alone: %r", error)
        return Vocabulary()


def _vocabulary(tokenizer: Any) -> Vocabulary:
    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    special = {id: token.content for id, token in added.items() if token.special}
    marks = {id for id, content in special.items() if content.strip("</>") not in TEXT}
    starts = (id for id, content in special.items() if content in MESSAGE_STARTS)
    return Vocabulary(decode, frozenset(marks), next(starts, None))
