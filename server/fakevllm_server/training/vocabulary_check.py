"""Check the token ids that clients send. An id outside of the model's vocabulary would end the
trainer's process in the middle of a step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from fakevllm_server.types.calls import RecordedCall


def read_vocab_size(model: str | None) -> int | None:
    """Return the number of token ids that the model in a folder has. Return None if the folder's
    config.json does not say it, or if `model` is no folder."""
    if model is None:
        return None
    try:
        config: Any = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # isolates: without the number nothing is refused
        return None
    if not isinstance(config, dict):
        return None
    whole = cast(dict[str, Any], config)
    for part in (whole.get("text_config"), whole):
        size: Any = cast(dict[str, Any], part).get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return None


def check_ids(calls: Iterable[RecordedCall], vocab_size: int | None) -> None:
    """Raise ValueError if a call has a token id outside of the vocabulary. If `vocab_size` is None,
    the size is unknown, and only negative ids are refused."""
    for call in calls:
        for ids in (call.prompt_ids, call.response_ids):
            if not ids:
                continue
            low, high = min(ids), max(ids)
            if low < 0:
                raise ValueError(f"the token id {low} is negative")
            if vocab_size is not None and high >= vocab_size:
                raise ValueError(
                    f"the token id {high} is outside of the model's vocabulary of {vocab_size} ids"
                )
